"""Which arms `pyspark-moe bench` compares, how llama-server's offload is sized beside them, and what its table says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pyspark_moe.errors import ConfigError
from pyspark_moe.measure import own_source
from pyspark_moe.measure.bench import Work
from pyspark_moe.measure.bench_arms import Arm, Budget, Setup, first_n_cpu_moe, fit_together, make_arms, next_n_cpu_moe, offload_of, parse_budgets
from pyspark_moe.measure.bench_results import Found, compared, metrics_of, ratio, results, table, unequal
from pyspark_moe.measure.server import Answer
from pyspark_moe.measure.sizes import kept_bytes
from pyspark_moe.model_info import ExpertLayer, ModelInfo

GIB = 2**30
LAYERS = tuple(ExpertLayer(layer, 16, (GIB // 32, GIB // 32)) for layer in range(1, 5))  # block 0 is dense; 1 GiB a layer
MODEL = ModelInfo(Path("m.gguf"), (), "a", "m", 5, 64, 100, 4096, 2, LAYERS, 5 * GIB, 5 * GIB, {})
BUDGETS = parse_budgets("60%, 2GiB")


def setup(**values: object) -> Setup:
    return replace(Setup(MODEL, BUDGETS, True, 1024, 512, ("dflash_server",)), **values)


def test_budgets() -> None:
    assert parse_budgets("60%,8GiB, 12.5%,.5g,60%,") == (Budget(share=0.6), Budget(gib=8), Budget(share=0.125), Budget(gib=0.5))
    assert [b.label for b in parse_budgets("60%,8GiB,12.5%,.5g")] == ["60%", "8GiB", "12.5%", "0.5GiB"]
    assert parse_budgets("") == ()
    for bad in ("60", "-1%", "100%", "0GiB", "8MB", "x%", "1e999GiB", "60%;40%"):
        with pytest.raises(ConfigError, match="--budgets has"):
            parse_budgets(bad)


def test_arms_on_a_gpu() -> None:
    arms = {arm.name: arm for arm in make_arms(setup())}
    assert list(arms) == ["all-resident", "spark-100%", "spark-60%", "cpu-moe-60%", "spark-2GiB", "cpu-moe-2GiB"]
    assert all("-ngl 99" in " ".join(arm.flags) for arm in arms.values())
    assert arms["all-resident"].flags[-1] == "--no-spark" and arms["spark-60%"].flags[-3:] == ("--spark", "--spark-slots", "10")
    assert arms["spark-2GiB"].flags[-3:] == ("--spark", "--spark-vram", "2.0")
    assert [name for name, arm in arms.items() if arm.inexact] == ["cpu-moe-60%", "cpu-moe-2GiB"]
    assert [name for name, arm in arms.items() if arm.has_store] == ["spark-100%", "spark-60%", "spark-2GiB"]
    assert offload_of(tuple(arms.values()), arms["spark-60%"]) == "cpu-moe-60%" and offload_of(tuple(arms.values()), arms["spark-100%"]) is None


def test_arms_on_the_cpu() -> None:
    arms = {arm.name: arm for arm in make_arms(setup(on_gpu=False, shared=("-t", "2"), spark=("--spark-policy", "static")))}
    assert list(arms) == ["all-resident", "spark-100%", "spark-60%", "spark-2GiB", "mmap"]
    assert arms["spark-2GiB"].flags[-5:] == ("--spark", "--spark-ram", "2.0", "--spark-policy", "static") and "-t" in arms["mmap"].flags
    assert "repacks" in arms["all-resident"].inexact and "not repacked" in arms["mmap"].inexact and arms["mmap"].flags[-2:] == ("--no-spark", "--no-repack")
    assert offload_of(tuple(arms.values()), arms["spark-60%"]) == "mmap"
    plain = make_arms(setup(on_gpu=False, shared=("--no-repack",)))
    assert not any(arm.inexact for arm in plain)


def test_another_llama_server_is_asked_for_its_offload_only() -> None:
    arms = {arm.name: arm for arm in make_arms(setup(stock=("llama-server",)))}
    assert arms["cpu-moe-60%"].program == ("llama-server",) and not arms["cpu-moe-60%"].is_ours and "--no-spark" not in arms["cpu-moe-60%"].flags
    assert arms["all-resident"].program == ("dflash_server",) and arms["cpu-moe-60%"].inexact == "another program"
    assert [arm.name for arm in make_arms(setup(with_resident=False, with_offload=False))] == ["spark-100%", "spark-60%", "spark-2GiB"]


def test_servers_stay_loaded_only_where_all_of_them_surely_fit() -> None:
    arms = make_arms(setup())
    assert fit_together(setup(), arms, 100 * GIB, 100 * GIB)
    assert not fit_together(setup(), arms, 100 * GIB, 16 * GIB)  # 5 + 5 + 3.4 + 3.4 + 2 + 2 and contexts
    assert not fit_together(setup(), arms, 12 * GIB, 100 * GIB)  # three stores pin 4 each
    assert not fit_together(setup(), arms, 100 * GIB, None)
    on_cpu = setup(on_gpu=False)
    assert fit_together(on_cpu, make_arms(on_cpu), 40 * GIB, None) and not fit_together(on_cpu, make_arms(on_cpu), 20 * GIB, None)


def test_the_first_n_cpu_moe_follows_from_measured_memory_or_from_experts() -> None:
    budget = BUDGETS[0]
    assert first_n_cpu_moe(setup(), budget, 0, 6 * GIB, 4 * GIB) == 3  # 2 GiB too many: blocks 1 and 2
    assert first_n_cpu_moe(setup(), budget, 0, None, 4 * GIB) == 3  # 2.5 GiB of experts
    assert first_n_cpu_moe(setup(), BUDGETS[1], GIB, None, None) == 4  # as many bytes as the store has in its slots


def test_a_second_try_takes_what_the_first_one_taught() -> None:
    assert next_n_cpu_moe(setup(), 3, 4 * GIB, 4 * GIB, -1) == 3
    assert next_n_cpu_moe(setup(), 3, 4 * GIB + 1, 4 * GIB, -1) == 4
    assert next_n_cpu_moe(setup(), 3, 3 * GIB, 4 * GIB, -1) == 2  # there was room for another layer
    assert next_n_cpu_moe(setup(), 3, 3 * GIB, 4 * GIB, 2) == 3  # which is known to take too much
    assert next_n_cpu_moe(setup(), 5, 4 * GIB, GIB, -1) == 5  # no layer is left to move


@pytest.mark.parametrize("other_gib", [0.3, 1.7])
def test_tries_end_with_as_few_layers_in_ram_as_fit(other_gib: float) -> None:
    """A process that takes kept experts and something else, by whatever M the search begins with."""
    for begin in range(6):
        for limit in (2 * GIB, 3 * GIB, 5 * GIB):
            m, too_low, seen = begin, -1, []
            for _ in range(4):
                memory = kept_bytes(LAYERS, m) + int(other_gib * GIB)
                seen.append(m)
                better = next_n_cpu_moe(setup(), m, memory, limit, too_low)
                if better == m:
                    break
                too_low = max(too_low, m) if memory > limit else too_low
                m = better
            fitting = [n for n in range(6) if kept_bytes(LAYERS, n) + int(other_gib * GIB) <= limit]
            assert kept_bytes(LAYERS, m) == kept_bytes(LAYERS, min(fitting)), (begin, limit, seen)


def test_requests_fit_the_context() -> None:
    work = Work(3, 4, 256, 128, 2, 2048, 4)
    assert work.n_ctx == 2304 and Work(1, 1, 900, 200, 1, 16, 0).n_ctx == 1280
    arms = make_arms(setup(budgets=()))
    assert work.n_asked(arms, True) == 3 * 2 * 6 + 2 + 5 and work.n_asked(arms, False) == 3 * (2 * 6 + 2 + 5)


# ---- results


def answer(*tokens: int) -> Answer:
    return Answer(tokens, "x", 0.1, 1.0, len(tokens), 10.0, 5, 100.0)


def metrics(speed: float, **more: float) -> dict[str, float]:
    return {"decode_per_s": speed, "wall_decode_per_s": speed, "ttft_ms": 1000 / speed, "prefill_per_s": 10 * speed, "prefill_ttft_ms": 1.0, **more}


def found(*arms: Arm) -> Found:
    return Found(arms)


A, B, C = Arm("all-resident", (), (), True), Arm("spark-60%", (), ("-m", "/some/where/model.gguf", "--spark"), True, True, BUDGETS[0]), Arm("cpu-moe-60%", (), (), True, inexact="CPU", beside="spark-60%")


def test_ratios_are_within_rounds_that_both_have() -> None:
    f = found(A, B, C)
    f.add(0, "all-resident", metrics(100), [answer(1)])
    f.add(0, "spark-60%", metrics(50), [answer(1)])
    f.add(1, "spark-60%", metrics(80), [answer(1)])
    assert ratio(f, "cpu-moe-60%", "all-resident") is None and ratio(f, "spark-60%", None) is None
    assert ratio(f, "spark-60%", "all-resident")["decode_per_s"]["median"] == 0.5
    f.add(1, "all-resident", metrics(80), [answer(1)])
    f.add(1, "cpu-moe-60%", metrics(20), [answer(1)])
    value = results(f)["arms"]
    assert value["spark-60%"]["over_all_resident"]["decode_per_s"]["median"] == 0.75 and value["spark-60%"]["medians"]["decode_per_s"] == 65
    assert value["spark-60%"]["over_offload"]["decode_per_s"]["median"] == 4 and value["all-resident"]["over_all_resident"] is None


def test_tokens_are_compared_where_they_must_agree_and_counted_where_not() -> None:
    f = found(A, B, C)
    f.add(0, "all-resident", metrics(1), [answer(1, 2), answer(3, 4)])
    assert f.reference == "all-resident" and results(f)["exact"] is None  # nothing to compare with yet
    f.add(0, "cpu-moe-60%", metrics(1), [answer(1, 2), answer(3, 5)])
    assert results(f)["exact"] is None and compared(f, "cpu-moe-60%") == ({"round": 0, "request": 1, "token": 1}, 0.5)
    f.add(0, "spark-60%", metrics(1), [answer(1, 2), answer(3, 4)])
    assert results(f)["exact"] is True and unequal(f) == []
    f.add(1, "spark-60%", metrics(1), [answer(7, 7)])
    assert unequal(f) == []  # the reference has no such round yet
    f.add(1, "all-resident", metrics(1), [answer(7, 8)])
    assert results(f)["exact"] is False and unequal(f) == ["spark-60%"]
    assert compared(f, "spark-60%") == ({"round": 1, "request": 0, "token": 1}, 2 / 3)
    text = "\n".join(table(results(f)))
    assert "DIFFER in round 2, request 1, token 2" in text and "50% of answers the same" in text and "reference" in text
    assert "cpu-moe-60% is not expected to give equal tokens: CPU" in text


def test_a_text_that_differs_differs() -> None:
    f = found(A, B)
    f.add(0, "all-resident", metrics(1), [answer(1)])
    f.add(0, "spark-60%", metrics(1), [replace(answer(1), text="y")])
    assert unequal(f) == ["spark-60%"] and compared(f, "spark-60%")[0] == {"round": 0, "request": 0, "token": None}


def test_a_table_of_little() -> None:
    f = found(A, B)
    f.left_out["all-resident"] = "out of memory"
    f.facts["spark-60%"] = {"memory_bytes": None}
    assert results(f)["arms"]["spark-60%"]["flags"] == ["-m", "model.gguf", "--spark"]
    lines = table(results(f))
    assert "all-resident is left out: out of memory" in lines[-1] and "not compared" in lines[1] and "inf" not in lines[1]
    assert metrics_of({"bytes_read_per_token": 3.0, "bytes_home_per_token": 4.0})["bytes_per_token"] == 7 and "bytes_per_token" not in metrics_of({})


def test_own_source_is_the_same_for_a_seed() -> None:
    names = [[c.session.session for c in own_source.conversations(seed)] for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2] and len(names[0]) > 40 and len(own_source.digest()) == 64
    assert all(c.messages[0].text.startswith("```python\n") for c in own_source.conversations(0))
