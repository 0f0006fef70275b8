"""More budget never makes decoding slower: no layer loses a slot, so no layer hits less often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_moe import decision_gpu, device_placement, placement
from pyspark_moe.model_info import ExpertLayer, ModelInfo
from pyspark_moe.routing_trace import Routing
from pyspark_moe.simulator import Ram, simulate

# Strides of Q4_K and Q6_K matrices, small and large experts in one model; none is a multiple of a page.
LAYERS = [ExpertLayer(i, 24, (589_824, 589_824, 860_160) if i % 3 else (147_456, 147_456, 215_040)) for i in range(6)]
TOTAL = sum(layer.total_bytes for layer in LAYERS)
FLOOR = 4
Placement = Callable[[Sequence[ExpertLayer], int, dict[int, np.ndarray]], "list[int] | None"]
PLACEMENTS: dict[str, Placement] = {
    "ram-uniform": lambda layers, budget, hotness: placement.uniform_slots(layers, budget, FLOOR),
    "ram-greedy": lambda layers, budget, hotness: placement.greedy_slots(layers, budget, FLOOR, hotness),
    "device-uniform": lambda layers, budget, hotness: device_placement.uniform_slots(layers, budget),
    "device-greedy": lambda layers, budget, hotness: device_placement.greedy_slots(layers, budget, FLOOR, hotness),
    # what a GPU gets: uniform where the floor does not fit
    "device-greedy-or-uniform": lambda layers, budget, hotness: device_placement.greedy_slots(layers, budget, FLOOR, hotness)
    or device_placement.uniform_slots(layers, budget),
}
layers_strategy = st.lists(
    st.tuples(st.integers(1, 16), st.lists(st.integers(1, 3_000_000), min_size=1, max_size=3)), min_size=1, max_size=5
).map(lambda specs: [ExpertLayer(i, n, tuple(strides)) for i, (n, strides) in enumerate(specs)])


def skewed(layers: Sequence[ExpertLayer], seed: int) -> dict[int, np.ndarray]:
    """Uses of each expert, some layers flat and some steep."""
    rng = np.random.default_rng(seed)
    return {l.layer: rng.permutation(1000 * np.arange(1, l.n_expert + 1) ** -rng.uniform(0, 2)) for l in layers}


def stack_hits(selected: np.ndarray, n_expert: int) -> np.ndarray:
    """Hits of LRU at every number of slots, int[n_expert + 1], from stack distances; selected: int[n_tokens, n_used]."""
    hits, order = np.zeros(n_expert + 2, dtype=int), list(range(n_expert))
    for token in selected:
        for expert in token:
            hits[order.index(expert) + 1] += 1  # a hit with more slots than experts used since
        for expert in token:
            order.remove(expert)
            order.insert(0, expert)
    return np.cumsum(hits)[: n_expert + 1]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_sweep_of_budgets_never_hits_less(name: str) -> None:
    hotness = skewed(LAYERS, 1)
    rng = np.random.default_rng(2)
    curves = []
    for layer in LAYERS:
        shares = hotness[layer.layer] / hotness[layer.layer].sum()
        selected = np.array([rng.choice(layer.n_expert, FLOOR, replace=False, p=shares) for _ in range(80)])
        lru, static = stack_hits(selected, layer.n_expert), np.zeros(layer.n_expert + 1, dtype=int)
        by_heat = np.argsort(-hotness[layer.layer], kind="stable")
        static[1:] = np.cumsum(np.bincount(selected.ravel(), minlength=layer.n_expert)[by_heat])
        curves.append((lru, static))
    before, swept = (0, 0), 0
    for budget in range(0, 2 * TOTAL, TOTAL // 60):
        slots = PLACEMENTS[name](LAYERS, budget, hotness)
        if slots is None:
            assert before == (0, 0)
            continue
        now = tuple(sum(int(curve[kind][n]) for curve, n in zip(curves, slots)) for kind in (0, 1))
        assert now[0] >= before[0] and now[1] >= before[1], f"{budget} bytes: {slots}"
        before, swept = now, swept + 1
    assert swept > 50 and before == (sum(int(c[0][-1]) for c in curves), sum(int(c[1][-1]) for c in curves))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_policy_of_the_store_hits_no_less_with_a_larger_budget(name: str) -> None:
    """Its cache of n slots need not hold what one of n - 1 does, so a layer may lose a hit here and there, but not a tenth of
    a percent of all."""
    hotness = skewed(LAYERS, 1)
    rng = np.random.default_rng(3)
    heat = np.log(np.array([hotness[layer.layer] for layer in LAYERS]))
    experts = np.argsort(-(heat + rng.gumbel(size=(200, *heat.shape))), axis=2)[:, :, :FLOOR].astype(np.int16)
    routing = Routing(experts, np.arange(201), (24,) * len(LAYERS))
    rates = []
    for budget in range(TOTAL // 5, 3 * TOTAL // 2, TOTAL // 12):
        slots = PLACEMENTS[name](LAYERS, budget, hotness)
        if slots is not None:
            rates.append(simulate(routing, placement.make_plan(LAYERS, slots, hotness=hotness), Ram()).hit_rate)
    assert len(rates) > 10 and rates[-1] == 1 and rates[0] < 0.9
    assert min(np.diff(rates)) > -0.001, rates


@pytest.mark.parametrize("has_profile", [False, True])
def test_a_larger_share_of_a_gpu_takes_no_slot_away(has_profile: bool) -> None:
    """With the memory that stages large steps, whose size depends on the slots."""
    layers = tuple(ExpertLayer(i, 64, (589_824, 589_824, 860_160 if i % 2 else 589_824)) for i in range(8))
    model = ModelInfo(Path("m"), (Path("m"),), "test", "m", 8, 1024, 1000, 4096, 8, layers, 0, 0, {})
    hotness = skewed(layers, 4) if has_profile else None
    before, swept = [0] * len(layers), set()
    for budget in range(10**7, 2 * model.expert_bytes, model.expert_bytes // 60):
        slots, staging = decision_gpu._split(model, budget, hotness)
        assert sum(device_placement.slot_bytes(l, n) for l, n in zip(layers, slots)) + staging <= budget
        assert all(a <= b for a, b in zip(before, slots)), budget
        before = slots
        swept.add(tuple(slots))
    assert len(swept) > 40 and before == [64] * 8


@pytest.mark.parametrize("name", PLACEMENTS)
@settings(max_examples=40)
@given(layers=layers_strategy, budgets=st.tuples(st.integers(0, 60_000_000), st.integers(0, 60_000_000)), seed=st.integers(0, 1000))
def test_no_layer_loses_a_slot(name: str, layers: list[ExpertLayer], budgets: tuple[int, int], seed: int) -> None:
    hotness = skewed(layers, seed)
    less, more = (PLACEMENTS[name](layers, budget, hotness) for budget in sorted(budgets))
    if less is not None:
        assert more is not None
        assert all(a <= b for a, b in zip(less, more))


@settings(max_examples=40)
@given(layers_strategy, st.integers(0, 60_000_000), st.integers(0, 1000))
def test_device_slots_keep_the_budget_and_fill_their_pages(layers: list[ExpertLayer], budget: int, seed: int) -> None:
    floor = 2
    hotness = skewed(layers, seed)
    greedy = device_placement.greedy_slots(layers, budget, floor, hotness)
    assert greedy == device_placement.greedy_slots(layers, budget, floor, hotness)
    cost = sum(device_placement.slot_bytes(l, min(floor, l.n_expert)) for l in layers)
    assert (greedy is None) == (cost > budget)
    for slots in (greedy, device_placement.uniform_slots(layers, budget)):
        if slots is None:
            continue
        assert all(0 <= n <= l.n_expert for n, l in zip(slots, layers))
        assert sum(device_placement.slot_bytes(l, n) for l, n in zip(layers, slots)) <= budget
        grown = [device_placement.slot_bytes(l, n + 1) - device_placement.slot_bytes(l, n) for l, n in zip(layers, slots) if n < l.n_expert]
        assert all(more > 0 for more in grown)  # no slot that a paid page holds is left out
    if greedy is not None:
        assert all(n >= min(floor, l.n_expert) for n, l in zip(greedy, layers))


def test_device_greedy_gives_flat_layers_more() -> None:
    layers = [ExpertLayer(i, 64, (600_000, 600_000, 800_000)) for i in range(3)]
    flat, steep = np.full(64, 100.0), np.concatenate([[6000.0], np.full(63, 400 / 63)])
    slots = device_placement.greedy_slots(layers, 150 << 20, 8, {0: steep, 1: flat, 2: steep})
    assert slots is not None and slots[1] > 3 * slots[0] and slots[1] > 3 * slots[2]


def test_device_greedy_without_uses_is_about_uniform() -> None:
    layers = [ExpertLayer(i, 64, (600_000, 600_000, 800_000)) for i in range(3)]
    slots = device_placement.greedy_slots(layers, 150 << 20, 8, {})
    assert slots is not None and max(slots) - min(slots) <= 4
