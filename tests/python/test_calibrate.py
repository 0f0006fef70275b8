"""pyspark-moe calibrate on the demo model: the same bytes again at any residency, what is refused, what is left when it ends early."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corpora import write_corpora
from pyspark_moe import demo_model
from pyspark_moe.routing_profile import read_profile

CALIBRATE = (sys.executable, "-m", "pyspark_moe.tools.cli", "calibrate")
ONE_THREAD = ("--threads", "1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("corpora"))[0]


def calibrate(corpus: Path, *flags: object, model: object = None) -> subprocess.CompletedProcess[str]:
    command = [*CALIBRATE, corpus, "-m", model or demo_model.path(), *ONE_THREAD, *flags]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)


def without_time(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("# updated: ")]


def test_the_same_bytes_at_any_residency_and_others_with_another_seed(corpus: Path, tmp_path: Path) -> None:
    profiles = [tmp_path / f"{name}.spark.csv" for name in "abc"]
    for path, slots, seed in zip(profiles, (4, 32, 4), (7, 7, 8)):
        done = calibrate(corpus, "--out", path, "--tokens", 3000, "--spark-slots", slots, "--seed", seed, "--json", tmp_path / "r.json")
        assert done.returncode == 0, done.stderr
        assert "Read 3000 tokens" in done.stdout
    assert without_time(profiles[0]) == without_time(profiles[1]) != without_time(profiles[2])
    profile = read_profile(profiles[0])
    assert profile.sources == {"corpus": 3000} and profile.starts == 0 and profile.counts[1].sum() == 4 * 3000
    assert 4 * 3000 / 8 <= profile.counts[7].sum() <= 4 * 3000 / 4  # the last layer is computed for tokens with an output
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["partial"] is False and result["results"]["tokens"] == 3000 and result["settings"]["seed"] == 8


def test_adding_replacing_and_refusing(corpus: Path, tmp_path: Path) -> None:
    model = Path(shutil.copy(demo_model.path(), tmp_path / "model.gguf"))
    flags = ("--out", "auto", "--tokens", 600)
    assert calibrate(corpus, *flags, model=model).returncode == 0
    path = tmp_path / "model.gguf.spark.csv"
    once = read_profile(path)
    refused = calibrate(corpus, *flags, model=model)
    assert refused.returncode == 1 and "exists: --add" in refused.stderr and read_profile(path) == once
    assert calibrate(corpus, *flags, "--add", model=model).returncode == 0
    twice = read_profile(path)
    assert twice.tokens == 2 * once.tokens and (twice.counts[3] == 2 * once.counts[3]).all()
    assert calibrate(corpus, *flags, "--force", model=model).returncode == 0
    assert read_profile(path).tokens == once.tokens and (read_profile(path).counts[3] == once.counts[3]).all()


def test_a_time_out_keeps_what_was_counted_under_another_name(corpus: Path, tmp_path: Path) -> None:
    done = calibrate(corpus, "--out", tmp_path / "p.spark.csv", "--tokens", 10_000_000, "--timeout", 8, "--spark-slots", 4, "--json", tmp_path / "r.json")
    assert done.returncode == 124 and "The time is up" in done.stderr
    assert not (tmp_path / "p.spark.csv").exists()
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["partial"] is True and result["ended"].startswith("time-out")
    if result["results"]:  # a very busy machine may not have got that far
        assert read_profile(tmp_path / "p.partial.spark.csv").tokens == result["results"]["tokens"] > 0


def test_ctrl_c_and_a_killed_child(corpus: Path, tmp_path: Path) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        command = [*CALIBRATE, corpus, "-m", demo_model.path(), *ONE_THREAD, "--out", tmp_path / "p.spark.csv", "--tokens", 10_000_000, "--spark-slots", 2]
        process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
        child = wait_for_child(process.pid)
        time.sleep(1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors
        assert not Path(f"/proc/{child}").exists()
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
    os.kill(wait_for_child(process.pid), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "was ended by SIGKILL" in errors
    assert not (tmp_path / "p.spark.csv").exists() and not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def wait_for_child(pid: int) -> int:
    """The reading process, once it runs Python."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            try:
                if b"reading_child" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
            except OSError:
                pass
        time.sleep(0.05)
    raise AssertionError("there is no reading process")


def test_what_is_refused_before_anything_is_loaded(corpus: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    foreign = tmp_path / "foreign.spark.csv"
    foreign.write_text((Path(__file__).resolve().parent.parent / "data" / "profile_good.csv").read_text())
    for flags, text in (
        ((empty, "--out", tmp_path / "p.spark.csv"), "has no conversations"),
        ((corpus, "--out", foreign, "--add"), "it is of another model"),
        ((corpus, "--out", tmp_path / "p.spark.csv", "--json", tmp_path / "none" / "r.json"), "--json"),
        ((corpus, "--out", tmp_path / "p.spark.csv", "--timeout", 0), "--timeout is 0"),
    ):
        begin = time.monotonic()
        done = calibrate(*flags)
        assert done.returncode == 1 and text in done.stderr, done.stderr
        assert "Loading" not in done.stderr and time.monotonic() - begin < 60
    assert foreign.read_text().startswith("# pyspark_moe")
