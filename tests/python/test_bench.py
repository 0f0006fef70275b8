"""pyspark-moe bench: on the demo model, and with engines that stall, die, are stopped, refuse, do not fit, or answer something else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from corpora import write_corpora
from pyspark_moe import demo_model
from pyspark_moe.measure.calibrate import Counted, save_profile
from pyspark_moe.model_info import read_model_info
from pyspark_moe.model_profile import model_profile

TOOL = (sys.executable, "-m", "pyspark_moe.tools.cli", "bench", "-m")
FAKE = f"{sys.executable} {Path(__file__).resolve().parent.parent / 'fake_engine.py'}"
SMALL = ("--budgets", "60%,1GiB", "--rounds", 2, "--requests", 2, "--tokens", 8, "--warmup", 8, "--prefill-tokens", 64)
GPU_ARMS = ["all-resident", "spark-100%", "spark-60%", "cpu-moe-60%", "spark-1GiB", "cpu-moe-1GiB"]


class Run:
    """A bench that runs. Its temporary folder is its own, and must be empty afterwards."""

    def __init__(self, folder: Path, *flags: object, model: object = None, path: str = "") -> None:
        self.json, self.temporary = folder / "r.json", folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        command = [*TOOL, model or demo_model.path(), "--json", self.json, *flags]
        environment = {**os.environ, "TMPDIR": str(self.temporary), **({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})}
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def result(self) -> dict:
        return json.loads(self.json.read_text()) if self.json.exists() else {}

    def wait_for(self, arm: str, rounds: int = 1) -> None:
        """Until this arm was measured so often, or with 0 has been loaded."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.result().get("results", {}).get("arms", {}).get(arm, {}).get("rounds", -1) >= rounds:
                return
            time.sleep(0.01)
        raise AssertionError(f"{arm} was not measured: {self.end()}")

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def end(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr); nothing may be left of it."""
        try:
            out, errors = self.process.communicate(timeout=240)
        finally:
            self.process.kill()
        assert not list(self.temporary.iterdir())
        return self.process.returncode, out, errors


def fake(folder: Path, behaviour: str, *flags: object, on: str = "cpu", path: str = "") -> tuple[int, str, str, dict]:
    run = Run(folder, "--engine", f"{FAKE} {behaviour}", "--on", on, *SMALL, *flags, path=path)
    return *run.end(), run.result()


def test_arms_of_the_demo_model(tmp_path: Path) -> None:
    """The model gets no profile, its own is not touched, and the copy of a given one is gone."""
    model = Path(shutil.copy(demo_model.path(), tmp_path / "model.gguf"))
    info = read_model_info(model)
    profile = model_profile(info, path=None)
    uses = {layer.layer: np.arange(1.0, layer.n_expert + 1) for layer in info.layers}
    save_profile(profile, Counted(tokens=1000, counts=uses), add=False)
    before, files = profile.path.read_bytes(), {p.name for p in tmp_path.iterdir()}
    flags = ("--budgets", "60%,0.02GiB,0.0001GiB", "--rounds", 2, "--requests", 2, "--tokens", 32, "--warmup", 64, "--prompt-tokens", 96, "--prefill-tokens", 256)
    run = Run(tmp_path, *flags, "--server-flags=-t 1 --no-repack", "--profile", "auto", "--on", "cpu", model=model)
    code, out, errors = run.end()
    assert code == 0, errors
    result = run.result()
    found = result["results"]
    assert result["partial"] is False and found["exact"] is True and found["reference"] == "all-resident"
    assert list(found["arms"]) == ["all-resident", "spark-100%", "spark-60%", "spark-0.02GiB", "mmap"]
    assert "is too small" in found["left_out"]["spark-0.0001GiB"] and "spark-0.0001GiB is left out" in out
    for name, arm in found["arms"].items():
        medians = arm["medians"]
        assert arm["rounds"] == 2 and medians["decode_per_s"] > 0 and medians["ttft_ms"] > 0 and medians["prefill_per_s"] > 0 and arm["memory_bytes"] > 2**20
        assert arm["prefill_tokens_processed"] == 256
        assert (arm["over_all_resident"] is None) == (name == "all-resident") and (arm["offload"] == "mmap") == name.startswith("spark")
        assert ("hit_rate" in medians) == name.startswith("spark")
        assert arm["must_equal_reference"] and arm["same_answers"] == 1.0 and arm["differs_at"] is None
    assert found["arms"]["spark-100%"]["medians"]["hit_rate"] == 1 and found["arms"]["spark-60%"]["n_fast"] == 7 * 19
    cold = found["arms"]["spark-60%"]["medians"]
    assert 0 < cold["hit_rate"] < 1 and cold["bytes_per_token"] > 0 and cold["promotions_per_token"] > 0
    assert cold["bytes_per_token"] == pytest.approx(sum(cold.get(f"bytes_{kind}_per_token", 0) for kind in ("read", "home", "ahead")), rel=0.2)
    assert result["settings"]["profile_sha256"] and profile.path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == files | {"r.json", "tmp"} and not list(Path.home().rglob("*.spark.csv"))


def test_other_tokens_fail_and_say_where(tmp_path: Path) -> None:
    code, out, errors, result = fake(tmp_path, "other")
    assert code == 1 and "Greedy tokens of spark-60%, spark-1GiB are not those of spark-100%" in errors
    assert result["partial"] is True and result["results"]["exact"] is False
    assert result["results"]["arms"]["spark-60%"]["differs_at"] == {"round": 0, "request": 0, "token": 2}
    assert out.count("DIFFER in round 1, request 1, token 3") == 2


def test_arms_that_need_not_agree_do_not_fail(tmp_path: Path) -> None:
    code, out, errors, result = fake(tmp_path, "cpu-moe", on="gpu")
    found = result["results"]
    assert code == 0, errors
    assert list(found["arms"]) == GPU_ARMS and found["exact"] is True and found["reference"] == "all-resident"
    assert found["arms"]["cpu-moe-60%"]["same_answers"] == 0.5  # the prefills have one token each, which is the same
    assert found["arms"]["cpu-moe-60%"]["n_cpu_moe"] == 4 and found["arms"]["cpu-moe-60%"]["matched_by"] == "bytes of experts"
    assert "cpu-moe-60% is not expected to give equal tokens: experts on the CPU are rounded otherwise" in out


def test_a_model_that_does_not_fit_the_gpu_is_compared_without_that_arm(tmp_path: Path) -> None:
    code, out, errors, result = fake(tmp_path, "full", "--one-at-a-time", on="gpu")
    found = result["results"]
    assert code == 0, errors
    assert "cudaMalloc failed: out of memory" in found["left_out"]["all-resident"] and list(found["arms"]) == GPU_ARMS[1:]
    assert found["reference"] == "spark-100%" and all(arm["over_all_resident"] is None for arm in found["arms"].values())
    assert found["arms"]["spark-60%"]["over_offload"]["decode_per_s"]["median"] == pytest.approx(1)


def test_a_budget_that_is_refused_is_left_out(tmp_path: Path) -> None:
    code, out, errors, result = fake(tmp_path, "small")
    assert code == 0 and result["partial"] is False, errors
    assert result["results"]["left_out"] == {"spark-1GiB": "--spark-ram 1 is too small."} and "spark-1GiB is left out: --spark-ram 1 is too small." in out
    assert list(result["results"]["arms"]) == ["all-resident", "spark-100%", "spark-60%", "mmap"]


def test_offload_is_sized_by_measured_memory(tmp_path: Path) -> None:
    """A driver that says 500 MiB, 488 for budgets, and of offload 510 less three for each layer: so eight layers."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"""#!{sys.executable}
import os, re, sys
if "--query-compute-apps" not in " ".join(sys.argv): sys.exit(1)
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{{pid}}/cmdline").read().split(chr(0))
    except OSError:
        continue
    if any(word.endswith("fake_engine.py") for word in words):
        m = int(words[words.index("--n-cpu-moe") + 1]) if "--n-cpu-moe" in words else None
        print(f"{{pid}}, {{510 - 3 * m if m is not None else 488 if '--spark-slots' in words else 500}}")
""")
    smi.chmod(0o755)
    code, _, errors, result = fake(tmp_path, "serve", "--one-at-a-time", "--budgets", "60%", on="gpu", path=str(tmp_path))
    found = result["results"]["arms"]["cpu-moe-60%"]
    assert code == 0, errors
    assert found["matched_by"] == "memory" and found["n_cpu_moe"] == 8 and found["memory_bytes"] == 486 * 2**20 <= found["memory_limit_bytes"] == 488 * 2**20
    assert "of 0.48, trying" in errors and errors.count("trying") == errors.count("cpu-moe-60%: loading") - 2 > 0  # the second round knows


@pytest.mark.parametrize(
    ("behaviour", "flags", "code", "text"),
    [
        ("sleep", ("--stall", 1), 124, "starting, gave no sign of life for 1 s"),
        ("first", ("--stall", 1), 124, "no sign of life for 1 s"),
        ("stall", ("--timeout", 3), 124, "The time is up"),
        ("die", (), 1, "ended with exit code 3 while it was answering. Its last lines:\nout of memory"),
        ("crash", (), 1, "no such backend"),
    ],
)
def test_an_engine_that_stalls_or_dies(tmp_path: Path, behaviour: str, flags: tuple, code: int, text: str) -> None:
    begin = time.monotonic()
    ended, _, errors, result = fake(tmp_path, behaviour, *flags)
    assert ended == code and text in errors, errors
    assert result["partial"] is True and result["ended"].startswith("time-out" if code == 124 else "engine died")
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(("number", "code", "ended"), [(signal.SIGSTOP, 124, "time-out"), (signal.SIGKILL, 1, "engine died")])
@pytest.mark.parametrize("loaded", ["--together", "--one-at-a-time"])
def test_an_engine_that_is_stopped_or_killed_while_others_were_measured(tmp_path: Path, loaded: str, number: int, code: int, ended: str) -> None:
    run = Run(tmp_path, "--engine", f"{FAKE} slow", "--on", "cpu", *SMALL, loaded, "--stall", 2)
    run.wait_for("spark-100%")
    run.wait_for("spark-60%", 0)
    engines = run.children()
    for engine in engines:
        os.kill(engine, number)
    found, out, errors = run.end()
    result = run.result()
    assert found == code, errors
    assert result["partial"] is True and result["ended"].startswith(ended) and result["results"]["arms"]["spark-100%"]["rounds"] == 1
    assert "spark-100%" in out and "marked as partial" in errors and not any(Path(f"/proc/{engine}").exists() for engine in engines)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_keep_what_was_found(tmp_path: Path, number: int, code: int) -> None:
    run = Run(tmp_path, "--engine", f"{FAKE} slow", "--on", "cpu", *SMALL)
    run.wait_for("spark-60%")
    engines = run.children()
    run.process.send_signal(number)
    found, out, errors = run.end()
    result = run.result()
    assert found == code and result["partial"] is True and result["ended"].startswith("interrupted"), errors
    assert result["results"]["arms"]["spark-60%"]["rounds"] == 1 and result["results"]["exact"] is True and "spark-60%" in out
    assert "marked as partial" in errors and not any(Path(f"/proc/{engine}").exists() for engine in engines)


def test_prompts_of_a_corpus(tmp_path: Path) -> None:
    corpus = write_corpora(tmp_path)[1]
    code, _, errors, result = fake(tmp_path, "serve", "--corpus", corpus, "--rounds", 6, "--prompt-tokens", 50)
    assert code == 0 and "some are used again" in errors
    assert result["settings"]["prompts"] == "heldout.jsonl" and result["results"]["prompts"] == {"number": 11, "tokens": 543}


def test_what_is_refused(tmp_path: Path) -> None:
    foreign = Path(__file__).resolve().parent.parent / "data" / "profile_good.csv"
    for flags, text in (
        (("--budgets", "60"), "--budgets has '60'"),
        (("--context", 300), "--context 300 does not hold the requests"),
        (("--prefill-tokens", 5000), "need a context of 5120 tokens, and 'target-Q4_K_M.gguf' was made for 4096"),
        (("--profile", foreign), "it is of another model"),
        (("--profile", tmp_path / "none.csv"), "there is no such file"),
        (("--stall", 0), "--stall is 0"),
        (("--stock-command", "/nowhere/llama-server"), "cannot be started as the server 'mmap'"),
    ):
        code, _, errors, _ = fake(tmp_path, "serve", *flags)
        assert code == 1 and text in errors, errors
