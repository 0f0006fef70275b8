"""The arithmetic of benchmarks, and that unlike results are not compared."""
from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import common  # noqa: E402
import compare  # noqa: E402

RESULT = {
    "benchmark": "server", "method": "m", "commit": "a", "machine": {"cpu": {"name": "x"}}, "settings": {"threads": 2},
    "rounds": {"1 clients": [{"stock": {"tokens_per_s": 10.0}}, {"stock": {"tokens_per_s": 30.0}}]},
}  # fmt: skip


def test_rounds_are_interleaved_and_ratios_are_within_rounds() -> None:
    calls: list[str] = []
    speed = {"a": iter([1.0, 10.0, 100.0, 7.0]), "b": iter([2.0, 5.0, 200.0, 7.0])}

    def arm(name: str) -> dict[str, float]:
        calls.append(name)
        return {"speed": next(speed[name])}

    paired = common.run_paired({"a": lambda: arm("a"), "b": lambda: arm("b")}, 3, warmup=1)
    assert "".join(calls) == "ba" + "ab" + "ba" + "ab"
    assert [r["a"]["speed"] for r in paired.rounds] == [10.0, 100.0, 7.0]  # the first was the warm-up
    assert paired.ratio("b", "a", "speed")["median"] == 1.0
    assert paired.summary("a")["ratios"]["b"]["speed"] == {"median": 1.0, "lower_quartile": 0.75, "upper_quartile": 1.5}


def test_like_results_are_compared() -> None:
    new = copy.deepcopy(RESULT) | {"commit": "b"}
    new["rounds"]["1 clients"][0]["stock"]["tokens_per_s"] = 50.0
    assert compare.differences(RESULT, new) == []
    assert compare.rows(RESULT, new) == [("1 clients", "stock", "tokens_per_s", 20.0, 40.0)]


@pytest.mark.parametrize(("key", "value"), [("benchmark", "limit"), ("machine", {"cpu": {"name": "y"}}), ("method", "n"), ("settings", {"threads": 4})])
def test_unlike_results_are_refused(key: str, value: object, tmp_path: Path) -> None:
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, result in zip(paths, (RESULT, RESULT | {key: value})):
        path.write_text(json.dumps(result))
    done = subprocess.run([sys.executable, BENCHMARKS / "compare.py", *paths], capture_output=True, text=True)
    assert done.returncode == 1 and key in done.stderr and not done.stdout


def test_results_carry_no_path_of_a_machine() -> None:
    assert common._relative(str(common.ROOT / "pyspark_moe" / "x.gguf")) == "pyspark_moe/x.gguf"
    assert common._relative("/some/where/model.gguf") == "model.gguf"
    assert common._relative(["-m", "/a/b", 3]) == ["-m", "b", 3]
