"""bench_placement.py on the demo model: a small run of all its parts, and a time limit that leaves what there is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(tmp_path: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """What the program did, and its result."""
    command = [sys.executable, BENCHMARKS / "bench_placement.py", "--out", tmp_path, "--commit", "x", "--server-flags=-t 1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    (path,) = tmp_path.glob("*-x-placement.json")
    return done, json.loads(path.read_text())["results"]


def test_what_is_learned_closes_the_gap_and_totals_grow(tmp_path: Path) -> None:
    done, results = run(tmp_path, "--parts", "restarts", "bootstrap", "--repeats", "1", "--starts", "2", "--traffic", "2", "--history-tokens", "4000")
    assert done.returncode == 0, done.stderr
    assert results["ended"] == "complete" and results["exact"] is True and "failed" not in results
    restarts, bootstrap = results["restarts"], results["bootstrap"]
    assert restarts["totals_strictly_grow"] and [start["profile_afterwards"]["starts"] for start in restarts["starts"]] == [1, 2]
    assert restarts["rates"]["static"][1] > restarts["rates"]["static"][0] + 0.05  # only the placement differs
    assert all(4000 >= read["history"] > 3000 for read in bootstrap["tokens_by_source"])
    gap = bootstrap["gaps"]["static"]["100"]
    assert gap["floor"] == gap["bare"] < gap["learned"] and gap["closed_learned"] > 0.25
    drawn = subprocess.run([sys.executable, BENCHMARKS / "placement_plots.py", *tmp_path.glob("*.json"), "--name", "x", "--out", tmp_path],
                                     capture_output=True, text=True)  # fmt: skip
    assert drawn.returncode == 0 and (tmp_path / "placement-x.png").stat().st_size > 10_000, drawn.stderr


def test_a_time_limit_leaves_a_partial_result(tmp_path: Path) -> None:
    done, results = run(tmp_path, "--time-limit-s", "31", "--parts", "validate", "--tokens", "3000")
    assert done.returncode == 124 and results["ended"].startswith("time-out"), done.stderr
    assert results["calibrate"]["ended"]  # how far it came
