"""What residency decides when there is a GPU: sums that are kept, every refusal with its numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from test_decision import GIB, MIB, machine, model

from pyspark_moe.budget import Serving
from pyspark_moe.config import SparkConfig
from pyspark_moe.decision import decide
from pyspark_moe.decision_gpu import CONTEXT_BYTES, estimate, settle
from pyspark_moe.device_placement import PAGE, PADDING, slot_bytes, staging_bytes, uniform_slots
from pyspark_moe.errors import BudgetError, ConfigError, MachineMemoryError
from pyspark_moe.gpu import Gpu
from pyspark_moe.model_info import ExpertLayer
from pyspark_moe.server.report import block

MODEL = model(n_layers=40, n_expert=256, n_used=8, expert_mib=2, other_mib=800)  # 20 GiB of experts
CARD = Gpu("CUDA0", "a card", "0000:01:00.0", 12 * GIB, int(11.5 * GIB))
SERVING = Serving(n_ctx=1024)


def on(config: SparkConfig = SparkConfig(vram_gib=8), gpu: Gpu = CARD, serving: Serving = SERVING, ram_gib: float = 32, of=MODEL):
    return decide(of, machine(ram_gib), config, serving, has_cuda=True, gpus=(gpu,))


def test_slots_follow_from_measured_use_and_keep_the_sum() -> None:
    d = on()
    assert d.is_on and d.gpu is not None and not d.gpu.is_settled and d.plan is not None and d.plan.n_fast == 0
    used = 2 * GIB
    d = settle(d, SparkConfig(vram_gib=8), used, CARD.free_bytes - used)
    assert d.gpu is not None and d.gpu.is_settled and d.plan is not None
    assert 7.9 * GIB < d.need_bytes <= 8 * GIB
    assert d.need_bytes == used + d.fast_bytes + d.plan.staging_bytes + next(t.n_bytes for t in d.terms if t.name == "reserve")
    n = [p.n_fast for p in d.plan.layers]
    assert max(n) - min(n) <= 1 and all(len(p.initial) == p.n_fast for p in d.plan.layers)
    assert any("measured" in line for line in block(d))


def test_what_others_use_meanwhile_is_respected() -> None:
    d = settle(on(), SparkConfig(vram_gib=8), 2 * GIB, 3 * GIB)
    assert d.fast_bytes + d.plan.staging_bytes < 3 * GIB


def test_too_small_before_and_after_loading() -> None:
    with pytest.raises(BudgetError, match=r"--spark-vram 0.5 is too small: weights that are not experts 800.0 MiB.*Give at least"):
        on(SparkConfig(vram_gib=0.5))
    with pytest.raises(BudgetError) as e:
        settle(on(), SparkConfig(vram_gib=8), int(7.9 * GIB), GIB)
    found = re.search(r"measured 7.90 GiB.*at least --spark-vram ([\d.]+)", str(e.value))
    assert found and e.value.smallest_bytes is not None
    enough = float(found.group(1)) + 0.05
    assert settle(on(SparkConfig(vram_gib=enough)), SparkConfig(vram_gib=enough), int(7.9 * GIB), 3 * GIB).is_on


def test_more_than_the_gpu_has() -> None:
    with pytest.raises(BudgetError, match=r"--spark-vram 13 is more than CUDA0 \(a card\) has: 12.00 GiB"):
        on(SparkConfig(vram_gib=13))


def test_everything_fits() -> None:
    small = model(n_layers=4, n_expert=16, n_used=2)
    d = on(SparkConfig(vram_gib=8), of=small)
    assert d.gpu is not None and d.gpu.is_settled and d.has_all_fast
    assert not on(SparkConfig(mode="auto"), of=small).is_on
    assert "fits CUDA0" in on(SparkConfig(mode="auto"), of=small).why


def test_auto_acts_when_the_gpu_is_too_small() -> None:
    d = on(SparkConfig(mode="auto"))
    assert d.is_on and d.gpu is not None and "does not fit the memory of CUDA0" in d.why
    settled = estimate(d, SparkConfig(mode="auto"))
    assert settled.plan is not None and settled.plan.n_fast > 0 and settled.need_bytes < CARD.free_bytes + CONTEXT_BYTES


def test_homes_need_ram() -> None:
    with pytest.raises(MachineMemoryError, match=r"pinned RAM: 20.00 GiB, and 10.00 GiB is available.*-ngl 0"):
        on(ram_gib=10)
    assert on(SparkConfig(vram_gib=8, force=True), ram_gib=10).is_on
    assert not on(SparkConfig(mode="auto"), ram_gib=10).is_on


def test_slots_are_taken_literally() -> None:
    d = on(SparkConfig(slots=10))
    assert d.plan is not None and d.gpu is not None and d.gpu.is_settled
    assert {p.n_fast for p in d.plan.layers} == {10} and len(d.plan.layers[0].initial) == 10


def test_ram_is_asked_for_or_no_layer_is_on_the_gpu() -> None:
    assert on(SparkConfig(ram_gib=8)).gpu is None
    assert on(SparkConfig(), serving=replace(SERVING, n_gpu_layers=0)).gpu is None
    with pytest.raises(ConfigError, match="-ngl 0"):
        on(serving=replace(SERVING, n_gpu_layers=0))
    with pytest.raises(ConfigError, match="no CUDA device"):
        decide(MODEL, machine(32), SparkConfig(vram_gib=8), SERVING, has_cuda=True)
    with pytest.raises(ConfigError, match="give one of them"):
        SparkConfig(vram_gib=8, slots=3)


def test_a_context_nobody_asked_for_leaves_room_for_experts() -> None:
    long = replace(MODEL, n_ctx_train=1 << 20, n_layer=40)
    d = on(serving=Serving(n_ctx=0), of=long)
    assert 4096 <= d.serving.n_ctx < 1 << 20 and d.serving.n_ctx % 256 == 0
    assert on(serving=Serving(n_ctx=777), of=long).serving.n_ctx == 777


def test_the_gpu_that_the_user_named() -> None:
    second = replace(CARD, name="CUDA1")
    d = decide(MODEL, machine(32), SparkConfig(vram_gib=8), replace(SERVING, device="CUDA1"), has_cuda=True, gpus=(CARD, second))
    assert d.gpu is not None and d.gpu.gpu is second


def test_cost_of_slots() -> None:
    layer = ExpertLayer(0, 256, (PAGE, PAGE // 4))
    assert slot_bytes(layer, 0) == 0
    assert slot_bytes(layer, 1) == 3 * PAGE  # padding costs the first tensor a page
    assert slot_bytes(layer, 3) == 4 * PAGE + PAGE
    assert staging_bytes([layer], [256]) == 0
    assert staging_bytes([layer], [255]) >= 2 * (layer.expert_bytes + 2 * PADDING)
    for budget in (0, PAGE, 10 * PAGE, 333 * PAGE, 10**4 * PAGE):
        slots = uniform_slots([layer] * 5, budget)
        assert sum(slot_bytes(layer, n) for n in slots) <= budget
        more = [s for s in slots if s < 256]
        assert not more or budget - sum(slot_bytes(layer, n) for n in slots) < 2 * PAGE
