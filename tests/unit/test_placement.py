"""Placement: budgets are kept, slots are used, the same input gives the same output."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_moe.model_info import ExpertLayer
from pyspark_moe.placement import (
    fast_bytes,
    greedy_slots,
    make_plan,
    resident_bytes,
    smallest_budget,
    uniform_slots,
    window_bytes,
)

LAYERS = [ExpertLayer(i, 16, (5000, 5000, 7000)) for i in range(4)]

layers_strategy = st.lists(
    st.tuples(st.integers(1, 24), st.lists(st.integers(1, 20000), min_size=1, max_size=3)), min_size=1, max_size=6
).map(lambda specs: [ExpertLayer(i, n, tuple(strides)) for i, (n, strides) in enumerate(specs)])


def test_bytes_of_slots_are_whole_pages() -> None:
    layer = ExpertLayer(0, 4, (4096, 100))
    assert fast_bytes(layer, 0) == 0
    assert fast_bytes(layer, 2) == (2 + 1) * 4096 + (1 + 1) * 4096
    assert window_bytes(layer, 4) == 0
    assert window_bytes(layer, 3) == 4096 + 4096 + 100 + 4096


@given(layers_strategy, st.integers(0, 2_000_000), st.integers(1, 4))
def test_uniform_slots_keep_the_budget_and_use_it(layers: list[ExpertLayer], budget: int, floor: int) -> None:
    slots = uniform_slots(layers, budget, floor)
    if budget < smallest_budget(layers, floor):
        assert slots is None
        return
    assert slots is not None
    assert resident_bytes(layers, slots) <= budget
    assert all(min(floor, l.n_expert) <= n <= l.n_expert for n, l in zip(slots, layers))
    more = [min(n + 1, l.n_expert) for n, l in zip(slots, layers)]
    assert more == slots or resident_bytes(layers, more) > budget


@given(layers_strategy, st.integers(0, 2_000_000), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_greedy_slots_keep_the_budget_and_leave_no_room(layers: list[ExpertLayer], budget: int, floor: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    hotness = {l.layer: rng.integers(0, 1000, l.n_expert) for l in layers}
    slots = greedy_slots(layers, budget, floor, hotness)
    assert slots == greedy_slots(layers, budget, floor, hotness)
    if budget < smallest_budget(layers, floor):
        assert slots is None
        return
    assert slots is not None
    assert resident_bytes(layers, slots) <= budget
    assert all(min(floor, l.n_expert) <= n <= l.n_expert for n, l in zip(slots, layers))


def test_greedy_prefers_the_layer_with_more_to_gain() -> None:
    flat, skewed = np.full(16, 100.0), np.array([1500.0] + [100 / 15] * 15)
    budget = smallest_budget(LAYERS, 2) + 8 * LAYERS[0].expert_bytes
    slots = greedy_slots(LAYERS, budget, 2, {0: skewed, 1: skewed, 2: flat, 3: skewed})
    assert slots is not None
    assert slots[2] == max(slots) and sum(slots) - slots[2] <= 7


def test_everything_fits() -> None:
    budget = resident_bytes(LAYERS, [16] * 4)
    assert uniform_slots(LAYERS, budget, 2) == [16] * 4
    assert uniform_slots(LAYERS, budget - 1, 2) != [16] * 4


def test_the_plan_names_the_hottest_first() -> None:
    hotness = {l.layer: np.arange(16) for l in LAYERS}
    plan = make_plan(LAYERS, [0, 2, 16, 3], hotness=hotness, policy="static", seed=7)
    assert [p.initial for p in plan.layers] == [(), (15, 14), tuple(range(16)), (15, 14, 13)]
    assert (plan.policy, plan.seed, plan.n_fast) == ("static", 7, 21)


def test_without_hotness_slots_fill_by_misses() -> None:
    plan = make_plan(LAYERS, [4, 16, 0, 4])
    assert [p.initial for p in plan.layers] == [(), tuple(range(16)), (), ()]


def test_smallest_budget_is_sharp() -> None:
    smallest = smallest_budget(LAYERS, 3)
    assert uniform_slots(LAYERS, smallest, 3) is not None
    assert uniform_slots(LAYERS, smallest - 1, 3) is None


@pytest.mark.parametrize("n_used", [1, 16, 40])
def test_smallest_budget_never_exceeds_all_experts_resident(n_used: int) -> None:
    assert smallest_budget(LAYERS, n_used) <= resident_bytes(LAYERS, [16] * 4) + window_bytes(LAYERS[0], 0)
