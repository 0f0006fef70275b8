"""What residency decides: every refusal with its numbers, every mode."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pyspark_moe.budget import Serving, compute_bytes, format_gib_flag, kv_cache_bytes, settle_context
from pyspark_moe.config import GIB, SparkConfig
from pyspark_moe.decision import decide
from pyspark_moe.errors import BudgetError, ConfigError, MachineMemoryError, NoExpertsError
from pyspark_moe.memory import CgroupLimit, MachineMemory
from pyspark_moe.model_info import ExpertLayer, ModelInfo
from pyspark_moe.placement import resident_bytes, smallest_budget

MIB = 1024**2


def model(n_layers: int = 10, n_expert: int = 64, n_used: int = 4, expert_mib: int = 1, other_mib: int = 100) -> ModelInfo:
    layers = tuple(ExpertLayer(i, n_expert, (expert_mib * MIB,)) for i in range(n_layers))
    experts = n_layers * n_expert * expert_mib * MIB
    return ModelInfo(
        path=Path("m.gguf"),
        shards=(Path("m.gguf"),),
        architecture="a",
        name="m",
        n_layer=n_layers,
        n_embd=64,
        n_vocab=1000,
        n_ctx_train=1024,
        n_expert_used=n_used,
        layers=layers,
        tensor_bytes=experts + other_mib * MIB,
        file_bytes=experts + other_mib * MIB,
        metadata={"a.attention.head_count": 4, "a.attention.head_count_kv": 2},
    )


def machine(available_gib: float, total_gib: float = 64) -> MachineMemory:
    return MachineMemory(int(total_gib * GIB), int(available_gib * GIB))


MODEL = model()  # 640 MiB of experts
SMALLEST = smallest_budget(MODEL.layers, MODEL.n_expert_used)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ram_gib": 0}, "--spark-ram is 0: .*greater than 0"),
        ({"ram_gib": -1.5}, "--spark-ram is -1.5"),
        ({"ram_gib": math.nan}, "--spark-ram is nan"),
        ({"ram_gib": math.inf}, "--spark-ram is inf"),
        ({"vram_gib": -math.inf}, "--spark-vram is -inf"),
        ({"ram_gib": True}, "--spark-ram is True"),
        ({"slots": -1}, "--spark-slots is -1"),
        ({"slots": 4, "ram_gib": 1}, "give one of them"),
        ({"policy": "lru"}, "--spark-policy is 'lru'"),
        ({"io_threads": 65}, "--spark-io-threads is 65"),
        ({"mode": "maybe"}, "mode is 'maybe'"),
        ({"mode": "off", "ram_gib": 1}, "--no-spark"),
    ],
)
def test_values_that_cannot_be_used(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SparkConfig(**arguments)


def test_a_budget_is_kept_and_used() -> None:
    budget = 320 * MIB
    d = decide(MODEL, machine(8), SparkConfig(ram_gib=budget / GIB))
    assert d.is_on and d.plan is not None and d.budget_bytes == budget
    used = d.fast_bytes + d.window_bytes
    assert used == resident_bytes(MODEL.layers, [p.n_fast for p in d.plan.layers])
    assert budget - 2 * MIB * 1.1 < used <= budget


def test_a_budget_below_one_token_names_the_smallest_that_works() -> None:
    with pytest.raises(BudgetError) as e:
        decide(MODEL, machine(8), SparkConfig(ram_gib=0.01))
    assert e.value.smallest_bytes == SMALLEST
    flag = str(e.value).split("--spark-ram ")[-1].rstrip(".")
    assert decide(MODEL, machine(8), SparkConfig(ram_gib=float(flag))).is_on
    with pytest.raises(BudgetError):
        decide(MODEL, machine(8), SparkConfig(ram_gib=float(flag) * 0.95))


def test_a_budget_larger_than_the_machine() -> None:
    with pytest.raises(BudgetError, match=r"--spark-ram 65 is more than this machine has: 64.00 GiB"):
        decide(MODEL, machine(8), SparkConfig(ram_gib=65))
    small_group = replace(machine(8), cgroup=CgroupLimit(2, "/sys/fs/cgroup/job", 1 * GIB, GIB))
    with pytest.raises(BudgetError, match="limit of control group /sys/fs/cgroup/job"):
        decide(MODEL, small_group, SparkConfig(ram_gib=2))


def test_too_little_memory_is_refused_with_the_bill_and_forced_on_request() -> None:
    config = SparkConfig(ram_gib=320 * MIB / GIB)
    with pytest.raises(MachineMemoryError, match=r"fast expert slots 2\d\d.*200.0 MiB is available on this machine.*--spark-force"):
        decide(MODEL, machine(200 / 1024), config)
    d = decide(MODEL, machine(200 / 1024), replace(config, force=True))
    assert d.is_on and "--spark-force" in d.notes[-1]


def test_slots() -> None:
    none = decide(MODEL, machine(8), SparkConfig(slots=0))
    assert none.is_on and none.fast_bytes == 0 and none.plan is not None and none.plan.n_fast == 0
    some = decide(MODEL, machine(8), SparkConfig(slots=5))
    assert some.plan is not None and {p.n_fast for p in some.plan.layers} == {5}
    assert "miss often" in some.notes[0]
    every = decide(MODEL, machine(8), SparkConfig(slots=1000))
    assert every.has_all_fast and every.notes == ("--spark-slots 1000: a layer has 64 experts, so 64 are used",)


def test_on_without_a_budget_takes_everything_that_fits() -> None:
    assert decide(MODEL, machine(8), SparkConfig()).has_all_fast
    d = decide(MODEL, machine(0.7), SparkConfig())
    assert d.is_on and not d.has_all_fast
    assert d.need_bytes <= d.machine.available_bytes
    with pytest.raises(MachineMemoryError, match="left for experts"):
        decide(MODEL, machine(0.4), SparkConfig())
    assert decide(MODEL, machine(0.4), SparkConfig(force=True)).is_on


def test_auto() -> None:
    auto = SparkConfig(mode="auto")
    fits = decide(MODEL, machine(8), auto)
    assert not fits.is_on and "the model fits" in fits.why
    tight = decide(MODEL, machine(0.6), auto)
    assert tight.is_on and "does not fit" in tight.why
    hopeless = decide(MODEL, machine(0.3), auto)
    assert not hopeless.is_on and "left for experts" in hopeless.notes[0]
    asked = decide(MODEL, machine(8), SparkConfig(mode="auto", slots=8))
    assert asked.is_on  # a budget is a wish, even without --spark


def test_off_is_a_hard_switch() -> None:
    assert not decide(MODEL, machine(0.1), SparkConfig(mode="off")).is_on


def test_dense_models() -> None:
    dense = replace(MODEL, layers=(), n_expert_used=0)
    d = decide(dense, machine(8), SparkConfig())
    assert not d.is_on and "dense" in d.why
    for budget in ({"ram_gib": 1}, {"slots": 3}):
        with pytest.raises(NoExpertsError, match="dense model"):
            decide(dense, machine(8), SparkConfig(**budget))


def test_gpu_memory_without_cuda() -> None:
    with pytest.raises(ConfigError, match=r"needs a CUDA build.*\(off: not found: nvcc\)"):
        decide(MODEL, machine(8), SparkConfig(vram_gib=8), cuda_reason="off: not found: nvcc")
    with pytest.raises(ConfigError, match="no CUDA device was found"):
        decide(MODEL, machine(8), SparkConfig(vram_gib=8), has_cuda=True)


def test_tensors_that_the_user_placed_win() -> None:
    assert not decide(MODEL, machine(0.6), SparkConfig(mode="auto"), has_overrides=True).is_on
    with pytest.raises(ConfigError, match="--cpu-moe"):
        decide(MODEL, machine(8), SparkConfig(), has_overrides=True)


def test_cache_size() -> None:
    m = replace(MODEL, metadata={"a.attention.head_count": 4, "a.attention.head_count_kv": (2,) * 9 + (0,)})
    per_token = 9 * 2 * (16 + 16) * 2
    assert kv_cache_bytes(m, Serving(n_ctx=100)) == 100 * per_token
    assert kv_cache_bytes(m, Serving()) == 1024 * per_token
    assert kv_cache_bytes(m, Serving(n_ctx=100, cache_type_k="q8_0", cache_type_v="q8_0")) == 100 * per_token * 34 // 64
    windowed = replace(m, metadata={**m.metadata, "a.attention.sliding_window": 10, "a.attention.sliding_window_pattern": (True,) * 9 + (False,)})
    assert kv_cache_bytes(windowed, Serving(n_ctx=10000, n_ubatch=90)) == 100 * per_token


def test_the_context_is_the_one_llama_server_settles_on() -> None:
    long = replace(MODEL, n_ctx_train=2**18)
    fitted = Serving(is_fitted=True)

    def context(physical_gib: float, serving: Serving = fitted) -> int:
        return settle_context(long, serving, int(physical_gib * GIB)).n_ctx

    assert context(64) == 2**18
    assert context(1) == 4096
    assert context(1, replace(fitted, n_ctx=500)) == 500
    assert context(1, replace(fitted, is_fitted=False)) == 2**18
    between = context(2)
    assert 4096 < between < 2**18
    at = replace(fitted, n_ctx=between)
    assert long.tensor_bytes + kv_cache_bytes(long, at) + compute_bytes(long, at) == pytest.approx(GIB, rel=1e-3)


def test_a_flag_is_never_below_its_bytes() -> None:
    for n in (1, 999, SMALLEST, 123456789, 64 * GIB, 64 * GIB + 1):
        assert n <= float(format_gib_flag(n)) * GIB
        assert float(format_gib_flag(n)) * GIB <= max(n * 1.06, n + GIB / 1000 + 2)
