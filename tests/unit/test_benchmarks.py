"""The arithmetic of benchmarks, and that unlike results are not compared."""
from __future__ import annotations

import copy
import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pyspark_moe.model_info import ExpertLayer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_cuda  # noqa: E402
import common  # noqa: E402
import compare  # noqa: E402
import cuda_arms  # noqa: E402
import cuda_device  # noqa: E402
import cuda_plan  # noqa: E402

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


# ---- bench_cuda.py

LAYERS = tuple(ExpertLayer(layer, 10, (60, 40)) for layer in range(1, 5))  # block 0 is dense; 1000 bytes a layer, 4000 in all


def test_a_share_is_slots_and_bytes() -> None:
    assert [cuda_plan.slots_for_share(LAYERS, s) for s in (0.6, 0.4, 0.2, 0.1)] == [6, 4, 2, 1]
    assert cuda_plan.resident_bytes(LAYERS, 6) == 4 * 6 * 100
    assert cuda_plan.resident_bytes(LAYERS, 100000) == 4000


@pytest.mark.parametrize(("limit", "m"), [(4000, 0), (3999, 2), (3000, 2), (2400, 3), (1000, 4), (999, 5), (0, 5), (-1, 5)])
def test_stock_keeps_as_many_layers_as_fit(limit: int, m: int) -> None:
    assert cuda_plan.n_cpu_moe(LAYERS, limit) == m
    kept = cuda_plan.kept_bytes(LAYERS, m)
    assert kept <= max(limit, 0)
    assert m == 0 or cuda_plan.kept_bytes(LAYERS, m - 1) > limit  # one fewer in RAM would be too much


def test_layers_follow_from_measured_memory() -> None:
    # 5000 bytes with all experts on the GPU, 2700 allowed: 1700 bytes of experts may stay
    assert cuda_plan.limit_from_memory(LAYERS, 5000, 2700) == 1700
    assert cuda_plan.n_cpu_moe(LAYERS, 1700) == 4
    assert cuda_plan.limit_from_memory(LAYERS, 5000, 6000) == 4000
    assert cuda_plan.more_layers(LAYERS, 3, 1) == 4  # 2000 bytes kept were 1 too many
    assert cuda_plan.more_layers(LAYERS, 3, 1001) == 5


def test_prediction_adds_the_bus_to_the_base() -> None:
    assert cuda_plan.predicted_per_s(200, 0, 50e9) == pytest.approx(200)
    assert cuda_plan.predicted_per_s(200, 250e6, 50e9) == pytest.approx(100)  # 5 ms and 5 ms


def test_counters_become_rates_per_routed_token() -> None:
    before = {"uses": 100, "hits": 90, "misses": 10, "bytes_home": 1000, "bytes_read": 0, "promotions": 5, "evictions": 9}
    after = {"uses": 180, "hits": 166, "misses": 14, "bytes_home": 1400, "bytes_read": 80, "promotions": 6, "evictions": 9}
    counts = cuda_plan.between(before, after)
    assert counts == {"uses": 80, "hits": 76, "misses": 4, "bytes_home": 400, "bytes_read": 80, "promotions": 1}
    assert cuda_plan.add([counts, counts])["uses"] == 160
    rates = cuda_plan.per_token(counts, uses_per_token=8)  # 10 tokens
    assert rates == {"hit_rate": 0.95, "misses_per_token": 0.4, "bytes_home_per_token": 40, "bytes_read_per_token": 8, "promotions_per_token": 0.1}


def reading(tokens: int, hits: int) -> dict[str, int]:
    return {"uses": 8 * tokens, "hits": hits, "misses": 8 * tokens - hits, "bytes_home": 0, "bytes_read": 0, "promotions": 0}


def test_curves_say_when_a_hit_rate_is_back() -> None:
    points = cuda_plan.curve([reading(0, 0), reading(16, 64), reading(16, 64), reading(32, 186), reading(48, 308)], 8, start=100)
    assert [(p["tokens"], p["hit_rate"]) for p in points] == [(116, 0.5), (132, 0.9531), (148, 0.9531)]  # nothing happened in between
    assert cuda_plan.level(points, 32) == pytest.approx(0.9531)
    assert cuda_plan.level(points, 64) is None
    assert cuda_plan.recovery_tokens(points, 0.96) == 132
    assert cuda_plan.recovery_tokens(points, 0.99) is None and cuda_plan.recovery_tokens(points, None) is None
    assert cuda_plan.is_steady(points, window=16) and not cuda_plan.is_steady(points[:2], window=16)


def test_claims_are_those_of_the_arm_and_what_was_not_measured_is_open() -> None:
    def state(**values: object) -> dict[tuple[str, float], bool | None]:
        arm = {"arm": "x", "share": 0.6, "decode_over_base": 0.96, "prefill_over_base": 0.9} | values
        return {(c["claim"].split(",")[0], c["goal"]): c["holds"] for c in cuda_plan.claims([cuda_plan.Comparison(**arm)])}

    resident = state(share=1.0, same_text=1.0)
    assert resident == {("decode / stock all on GPU", 0.99): False, ("share of answers equal to stock's", 1.0): True}
    warm = state(decode_over_counterpart=1.5, decode_over_predicted=0.92)
    assert warm == {
        ("decode / stock all on GPU", 0.95): True, ("prefill / stock all on GPU", 0.95): False, ("decode / stock --n-cpu-moe", 1.0): True,
        ("decode / stock --n-cpu-moe", 2.0): False, ("decode / (all-GPU time + missed bytes / PCIe)", 0.9): True,
        ("share of answers equal to stock's", 1.0): None,
    }  # fmt: skip
    few = state(share=0.1, budget_gib=8, memory_bytes=9 * 2**30, decode_over_counterpart=1.0)
    assert few[("decode / stock --n-cpu-moe", 1.0)] is False  # faster, not equal
    assert few[("GiB of device memory", 8)] is False
    assert ("decode / stock all on GPU", 0.95) not in few and ("decode / stock --n-cpu-moe", 2.0) not in few
    text = cuda_plan.table(cuda_plan.claims([cuda_plan.Comparison("ours-10", 0.1, 0.5, 0.5)]))
    assert "not measured" in text and "MISSED" not in text
    assert "inf" not in cuda_plan.speed_table({"stock": {"medians": {}, "memory_bytes": None}})


def test_groups_hold_no_more_servers_than_allowed() -> None:
    arms = [cuda_arms.Arm(n, (), (), True, share) for n, share in (("ours-100", 1.0), ("ours-60", 0.6), ("ours-40", 0.4))]

    def names(max_loaded: int, with_counterparts: bool = True) -> list[list[str]]:
        return [[arm.name for arm in group] for group in bench_cuda.make_groups(arms, max_loaded, with_counterparts)]

    assert names(3) == [["ours-100"], ["ours-60"], ["ours-40"]]
    assert names(4) == [["ours-100", "ours-60"], ["ours-40"]]
    assert names(3, False) == [["ours-100", "ours-60"], ["ours-40"]]
    base = cuda_arms.Arm("stock", ("s",), ("-m", "f"))
    assert bench_cuda.counterpart(base, arms[1], 7).command == ["s", "-m", "f", "--n-cpu-moe", "7"]
    assert bench_cuda.counterpart(base, arms[1], 7).name == "cpu-moe-60"


def test_prompts_are_token_ids_with_or_without_a_topic() -> None:
    assert cuda_arms.parse_prompts([[1, 2], {"topic": 3, "tokens": [4]}]) == [cuda_arms.Prompt((1, 2)), cuda_arms.Prompt((4,), 3)]
    for bad in ([], [[]], ["text"], [{"topic": 1}], [[1.5]]):
        with pytest.raises(ValueError):
            cuda_arms.parse_prompts(bad)
    made = cuda_arms.random_prompts(6, 50, 3, n_vocab=100)
    assert all(t * 3 // 100 == p.topic for p in made for t in p.tokens) and {p.topic for p in made} == {0, 1, 2}


def test_rounds_send_other_prompts_and_warming_up_has_its_own() -> None:
    prompts = [cuda_arms.Prompt((i,) * 5, i % 2) for i in range(8)]
    work = cuda_arms.Workload(prompts, n_prompt=3, n_decode=4, n_requests=2, n_prefill=12, n_prefills=1, n_warm=2)
    assert work.decode(0) == [(0, 0, 0), (1, 1, 1)] and work.decode(1) == [(2, 2, 2), (3, 3, 3)] and work.decode(3) == work.decode(0)
    assert work.warm() == [(7, 7, 7), (6, 6, 6)]
    assert work.prefill(1) == [(1,) * 5 + (2,) * 5 + (3,) * 2]
    assert work.topics() == [0, 1] and work.of_topic(1)[0] == (1, 1, 1)


def test_rounds_end_early_and_a_failing_round_loses_itself_only() -> None:
    times = iter([False, False, True])
    assert len(common.run_paired({"a": lambda: {"x": 1.0}}, 9, warmup=0, stop=lambda: next(times)).rounds) == 2
    values = iter([1.0, 2.0])
    kept = common.Paired(("a",))
    with pytest.raises(StopIteration):
        common.run_paired({"a": lambda: {"x": next(values)}}, 9, warmup=0, into=kept)
    assert kept.median("a", "x") == 1.5


def test_a_gpu_is_part_of_the_machine() -> None:
    facts = {"cpu": {"name": "AMD EPYC", "cores": 2}, "memory_gib": 23.5}
    assert common.machine_slug(facts) == "amd-epyc-2c-24g"  # as before
    gpus = common.parse_gpus("NVIDIA H200, 580.159.03, 143771, 5, 16\n")
    assert gpus == [{"name": "NVIDIA H200", "driver": "580.159.03", "memory_gib": 140.4, "pcie_generation": 5, "pcie_width": 16}]
    assert common.machine_slug(facts | {"gpus": gpus}) == "amd-epyc-2c-24g-1x-nvidia-h200"
    assert common.parse_gpus("X, 1, [N/A], [N/A], [N/A]")[0]["pcie_width"] is None
    assert common.parse_gpus("No devices were found") == []


def test_memory_of_a_process_is_the_sum_over_gpus_or_unknown() -> None:
    rows = [["12", "500"], ["13", "7"], ["12", "100"]]
    assert cuda_device.parse_process_memory(rows, 12) == 600 * 2**20
    assert cuda_device.parse_process_memory(rows, 99) is None
    assert cuda_device.parse_process_memory([["12", "[N/A]"]], 12) is None


def test_a_result_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    started = datetime.datetime(2026, 1, 2, 3, 4, 5)
    for n in (1, 2):  # the second replaces the first
        path = common.save("cuda", method="m", settings={}, results={"n": n}, rounds={}, load_before=0, folder=tmp_path, commit_text="abc+x", started=started)
    assert [p.name for p in tmp_path.iterdir()] == [path.name] == ["20260102-030405-abc-x-cuda.json"]
    assert json.loads(path.read_text())["results"] == {"n": 2} and json.loads(path.read_text())["commit"] == "abc+x"
    assert common._command("no-such-program") == ""


def test_the_commands_of_all_arms_are_shown_without_running_them() -> None:
    done = subprocess.run([sys.executable, BENCHMARKS / "bench_cuda.py", "--dry-run", "--budgets", "8", "--stock-command", "stock-server"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert "ours-60:" in done.stdout and "--spark --spark-slots 19" in done.stdout and "--spark-vram 8" in done.stdout
    assert "cpu-moe-60: stock-server" in done.stdout
