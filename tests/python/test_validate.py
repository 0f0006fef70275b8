"""pyspark-moe validate: on the demo model, and with engines that stall, die, refuse, or answer something else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corpora import write_corpora
from pyspark_moe import demo_model

TOOL = (sys.executable, "-m", "pyspark_moe.tools.cli")
FAKE = f"{sys.executable} {Path(__file__).resolve().parent.parent / 'fake_engine.py'}"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpora and a profile of the demo model."""
    folder = tmp_path_factory.mktemp("work")
    train, _ = write_corpora(folder)
    run("calibrate", train, "-m", demo_model.path(), "--out", folder / "demo.spark.csv", "--tokens", 6000, "--threads", 1, check=True)
    return folder


def run(*words: object, check: bool = False, tmp: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"TMPDIR": str(tmp)} if tmp else {})}
    return subprocess.run([*TOOL, *map(str, words)], capture_output=True, text=True, timeout=300, check=check, env=environment)


def validate(work: Path, tmp_path: Path, *flags: object) -> tuple[subprocess.CompletedProcess[str], dict]:
    """What the tool did, and its result; nothing of it may be left in its temporary folder or in the profile."""
    temporary = tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    before = (work / "demo.spark.csv").read_bytes()
    done = run("validate", work / "heldout.jsonl", "-m", demo_model.path(), "--profile", work / "demo.spark.csv", "--json", tmp_path / "r.json", *flags, tmp=temporary)
    assert not list(temporary.iterdir()) and (work / "demo.spark.csv").read_bytes() == before
    return done, json.loads((tmp_path / "r.json").read_text()) if (tmp_path / "r.json").exists() else {}


def test_arms_of_the_demo_model(work: Path, tmp_path: Path) -> None:
    done, result = validate(work, tmp_path, "--prompts", 6, "--tokens", 32, "--warmup", 64, "--prompt-tokens", 96, "--server-flags=-t 1")
    assert done.returncode == 0, done.stderr
    assert result["partial"] is False and result["results"]["exact"] is True
    arms = result["results"]["arms"]
    assert list(arms) == ["all-resident", "uniform", "calibrated", "calibrated+ring"]
    assert arms["all-resident"]["steady"]["hit_rate"] == 1 and arms["all-resident"]["n_fast"] == 224
    for name in list(arms)[1:]:
        steady = arms[name]["steady"]
        assert arms[name]["n_fast"] == 7 * 19 and steady["tokens"] == 4 * 32 and arms[name]["warm_up"]["tokens"] == 64
        assert 0 < steady["hit_rate"] < 1 and steady["cold_rate"] == pytest.approx(1 - steady["hit_rate"]) and steady["bytes_per_token"] > 0
        for request in arms[name]["requests"]:  # 31 tokens were decoded after the first one; what the prompt used is not in it
            assert abs(request["uses"] - 31 * 7 * 4) <= 7 * 4 * 2
    assert arms["calibrated"]["steady"]["hit_rate"] > arms["uniform"]["steady"]["hit_rate"] + 0.05
    assert arms["calibrated+ring"]["steady"]["hit_rate"] > arms["calibrated"]["steady"]["hit_rate"]
    assert arms["calibrated"]["curve_of_warm_up"] and "calibrated+ring" in done.stdout and done.stdout.count("the same") == 4


def test_other_tokens_fail_and_say_where(work: Path, tmp_path: Path) -> None:
    done, result = validate(work, tmp_path, "--engine", f"{FAKE} other", "--prompts", 3, "--tokens", 8, "--warmup", 8)
    assert done.returncode == 1 and "Greedy tokens of uniform, calibrated, calibrated+ring are not those of all-resident" in done.stderr
    assert result["results"]["exact"] is False and result["results"]["arms"]["uniform"]["differs_at"] == {"request": 0, "token": 2}
    assert "DIFFER in request 0, token 2" in done.stdout


def test_a_reference_that_is_refused_is_left_out(work: Path, tmp_path: Path) -> None:
    done, result = validate(work, tmp_path, "--engine", f"{FAKE} refuse", "--prompts", 3, "--tokens", 8, "--warmup", 8)
    assert done.returncode == 0 and "Arms are compared with one another only" in done.stderr
    assert "too little" in result["results"]["no_reference"] and list(result["results"]["arms"]) == ["uniform", "calibrated", "calibrated+ring"]


@pytest.mark.parametrize(
    ("behaviour", "flags", "code", "text"),
    [
        ("sleep", ("--stall", 1), 124, "starting, gave no sign of life for 1 s"),
        ("stall", ("--stall", 1), 124, "no sign of life for 1 s"),
        ("stall", ("--timeout", 3), 124, "The time is up"),
        ("die", (), 1, "ended with exit code 3 while it was answering. Its last lines:\nout of memory"),
        ("crash", (), 1, "no such backend"),
    ],
)
def test_an_engine_that_stalls_or_dies(work: Path, tmp_path: Path, behaviour: str, flags: tuple, code: int, text: str) -> None:
    begin = time.monotonic()
    done, result = validate(work, tmp_path, "--engine", f"{FAKE} {behaviour}", "--prompts", 3, "--tokens", 8, "--warmup", 8, *flags)
    assert done.returncode == code and text in done.stderr, done.stderr
    assert result["partial"] is True and result["ended"].startswith("time-out" if code == 124 else "engine died")
    assert time.monotonic() - begin < 60


def test_ctrl_c_keeps_what_was_found(work: Path, tmp_path: Path) -> None:
    command = [*TOOL, "validate", work / "heldout.jsonl", "-m", demo_model.path(), "--profile", work / "demo.spark.csv", "--json", tmp_path / "r.json",
               "--engine", f"{FAKE} first", "--prompts", 11, "--tokens", 20, "--warmup", 0]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (tmp_path / "r.json").exists() and '"all-resident": {' in (tmp_path / "r.json").read_text():
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    result = json.loads((tmp_path / "r.json").read_text())
    assert process.returncode == 130 and result["partial"] is True and result["ended"] == "interrupted" and "all-resident" in result["results"]["arms"]
    assert "all-resident" in out and "marked as partial" in errors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json"]


def test_what_is_refused(work: Path, tmp_path: Path) -> None:
    foreign = Path(__file__).resolve().parent.parent / "data" / "profile_good.csv"
    for flags, text in (
        (("--profile", foreign), "it is of another model"),
        (("--profile", tmp_path / "none.csv"), "there is no such file"),
        (("--arms", "uniform,best"), "--arms has 'best'"),
        (("--share", 60, "--spark-slots", 4), "give one of them"),
        (("--warmup", 100_000), "--warmup 100000 takes"),
        (("--prompts", 40, "--warmup", 128 * 20), "The corpus gives"),
    ):
        done, _ = validate(work, tmp_path, *flags, "--engine", f"{FAKE} serve")
        assert done.returncode == 1 and text in done.stderr, done.stderr
