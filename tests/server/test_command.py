"""dflash_server as a program: in place of llama-server, with exit codes, signals and refusals."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from pyspark_moe.routing_profile import read_profile

from harness import DFLASH_SERVER, TARGET, Server, run_server

Start = Callable[..., Server]


def test_what_scripts_scrape_is_there(start: Start) -> None:
    server = start(TARGET, "-c", 1024, "-np", 2)
    assert f"listening on http://127.0.0.1:{server.port}" in server.log
    assert re.search(r"n_slots = 2|initializing slots, n_slots = 2", server.log)
    server.complete("a = ", n=8)
    deadline = time.monotonic() + 10
    while "eval time" not in server.log:
        assert time.monotonic() < deadline, server.log[-2000:]
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_cleanly(start: Start, number: int) -> None:
    server = start("--demo", "--spark", "-c", 512)
    server.complete("a = ", n=4)
    assert server.stop(number) == 0


def test_the_first_signal_ends_a_stream(start: Start) -> None:
    server = start("--demo", "--spark", "-c", 4096, "-np", 1)
    events = server.stream("/completion", prompt="Once", n_predict=100000, temperature=0, ignore_eos=True)
    next(events)
    server.process.send_signal(signal.SIGINT)
    seen = []
    with contextlib.suppress(httpx.RemoteProtocolError):  # a server that stops does not write the end of a chunked body
        seen.extend(iter(lambda: next(events, None), None))  # the client goes on reading
    assert "shutting down" in str(seen[-1])
    assert server.process.wait(10) == 0


def test_the_second_signal_ends_at_once(start: Start) -> None:
    server = start("--demo", "--spark", "-c", 4096, "-np", 1)
    events = server.stream("/completion", prompt="Once", n_predict=100000, temperature=0, ignore_eos=True)
    next(events)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.05)  # the response notices the first signal within a second, so the server is still there
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(5) == 1
    assert "Received second interrupt" in server.log


def test_a_signal_while_loading_ends_the_program() -> None:
    process = subprocess.Popen([*DFLASH_SERVER, "--demo", "--spark", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (0, -signal.SIGTERM)
    process.stdout.close()


@pytest.mark.parametrize("redirections", ["2>/dev/full", "<&- >&- 2>&-"])
def test_a_log_that_cannot_be_written_ends_nothing(redirections: str, start: Start, tmp_path: Path) -> None:
    """A full disk under the log, or a service without streams: requests are answered, and the profile has its lines and no others."""
    profile = tmp_path / "profile.csv"
    program = ("sh", "-c", f'exec "$0" "$@" {redirections}', *DFLASH_SERVER)
    server = start("--demo", "--spark", "-c", 512, "--spark-profile", profile, "--spark-history", "none", program=program)
    assert server.complete("a = ", n=40)
    assert server.get("/spark/stats")["requests"]["finished"] == 1
    assert server.stop() == 0
    found = read_profile(profile)
    assert found is not None and found.tokens > 0


def test_unknown_flags_get_llama_servers_own_error() -> None:
    done = run_server(["--no-such-flag"])
    assert done.returncode == 1
    assert "error: invalid argument: --no-such-flag" in done.stdout + done.stderr


def test_versions_and_help() -> None:
    version = run_server(["--version"])
    assert version.returncode == 0
    assert "dflash_server 0.1.0" in version.stdout and "version: " in version.stdout + version.stderr
    helped = run_server(["--help-llama"])
    assert helped.returncode == 0 and "--ctx-size" in helped.stdout and "--spec-draft-n-max" in helped.stdout


def test_every_flag_of_llama_server_that_may_name_a_gguf_is_known() -> None:
    """A .gguf after a flag is that flag's value; the flags that take one are listed in arguments.py."""
    from pyspark_moe.server.arguments import GGUF_VALUED_FLAGS

    text = run_server(["--help-llama"]).stdout
    candidates = set()
    for line in text.splitlines():
        match = re.match(r"^((?:-{1,2}[\w-]+,?\s+)+)(FNAME|FILE|PATH|FNAME:SCALE,\.\.\.|MODEL_URL)\b", line)
        if match:
            names = re.findall(r"-{1,2}[\w-]+", match[1])
            if any(word in line.lower() for word in ("model", "lora", "control", "mmproj", "projector", "vocoder")):
                candidates |= set(names)
    known_others = {"--models-dir", "--models-preset"}
    assert "--lora" in candidates and "-m" in candidates
    assert candidates - known_others <= GGUF_VALUED_FLAGS, candidates - known_others - GGUF_VALUED_FLAGS


def test_the_plan_is_the_block(start: Start) -> None:
    plan = run_server([str(TARGET), "--spark-ram", "0.012", "-c", "512", "-np", "1", "--spark-plan"])
    assert plan.returncode == 0 and plan.stdout.startswith("spark: on (auto): a budget was given, --spark-ram 0.012")
    server = start(TARGET, "--spark-ram", "0.012", "-c", 512, "-np", 1)
    for line in plan.stdout.splitlines():
        if "memory" not in line:  # what is available changes
            assert line in server.log


def test_the_demo_keeps_half_of_its_experts(start: Start) -> None:
    server = start("--demo", "--spark", "-c", 512)
    sizes = server.get("/props")["spark"]["bytes"]
    assert sizes["budget"] == pytest.approx(sizes["experts"] / 2, rel=0.01)
    assert sizes["fast"] + sizes["window"] <= sizes["budget"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--spark-ram", "0"], "--spark-ram is 0: a memory budget must be greater than 0"),
        (["--spark-ram", "-1"], "--spark-ram is -1"),
        (["--spark-ram", "nan"], "--spark-ram is nan"),
        (["--spark-ram", "0.001"], "The smallest budget that works is --spark-ram 0.0069."),
        (["--spark-ram", "99999"], "is more than this machine has"),
        (["--spark-vram", "8"], "needs a CUDA build"),
        (["--draft", "16"], "--spec-draft-n-max 16"),
    ],
)
def test_refusals_are_one_sentence(args: list[str], message: str) -> None:
    done = run_server(["--demo", *args, "--port", "0"])
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_budget_works_exactly_from_the_named_size(start: Start) -> None:
    refused = run_server(["--demo", "--spark-ram", "0.006", "--port", "0"])
    smallest = re.search(r"smallest budget that works is --spark-ram ([\d.]+)\.$", refused.stderr, re.MULTILINE)
    assert refused.returncode == 1 and smallest
    server = start("--demo", "--spark-ram", smallest[1], "-c", 512)
    assert server.get("/props")["spark"]["active"]
    assert server.complete("a = ", n=4)
