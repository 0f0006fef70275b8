"""When slots move between layers, and how far."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyspark_moe.model_info import ExpertLayer
from pyspark_moe.placement import PRIOR_TOKENS, greedy_slots, make_plan, prior_uses, resident_bytes
from pyspark_moe.rebalance import RebalanceLimits, covered_share, rebalance

LAYERS = [ExpertLayer(i, 32, (40960, 40960, 40960)) for i in range(4)]


def uses(*flatness: float) -> dict[int, np.ndarray]:
    """Layer -> uses that fall with the expert's number; 0 is flat, 1 is steep."""
    return {i: 1000.0 * np.exp(-f * np.arange(32)) for i, f in enumerate(flatness)}


def test_a_gain_that_noise_could_explain_moves_nothing() -> None:
    hotness = uses(0.1, 0.1, 0.1, 0.11)
    current = [16, 16, 16, 16]
    budget = resident_bytes(LAYERS, current)
    best = greedy_slots(LAYERS, budget, 4, hotness)
    assert best is not None and best != current
    assert rebalance(LAYERS, current, best, hotness, lambda n: True) is None


def test_slots_move_to_the_flat_layer_a_few_at_a_time() -> None:
    hotness = uses(0.01, 0.5, 0.5, 0.5)
    current = [16, 16, 16, 16]
    budget = resident_bytes(LAYERS, current)

    def fits(n: object) -> bool:
        return resident_bytes(LAYERS, n) <= budget  # type: ignore[arg-type]

    best = greedy_slots(LAYERS, budget, 4, hotness)
    assert best is not None
    steps = 0
    while (moved := rebalance(LAYERS, current, best, hotness, fits, RebalanceLimits(least_gain=0.001))) is not None:
        assert fits(moved)
        assert sum(max(0, a - b) for a, b in zip(moved, current)) <= 0.05 * sum(current)
        assert covered_share(LAYERS, moved, hotness) > covered_share(LAYERS, current, hotness)
        current = moved
        steps += 1
        assert steps < 50
    assert current[0] > 24 and steps > 3


@given(
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.lists(st.integers(4, 32), min_size=4, max_size=4),
    st.integers(0, 100),
)
def test_a_step_keeps_the_budget_and_never_covers_less(flatness: list[float], current: list[int], extra: int) -> None:
    hotness = uses(*flatness)
    budget = resident_bytes(LAYERS, current) + extra * 40960
    best = greedy_slots(LAYERS, budget, 4, hotness)
    assert best is not None
    moved = rebalance(LAYERS, current, best, hotness, lambda n: resident_bytes(LAYERS, n) <= budget)
    if moved is not None:
        assert resident_bytes(LAYERS, moved) <= budget
        assert all(0 <= n <= 32 for n in moved)
        assert covered_share(LAYERS, moved, hotness) > covered_share(LAYERS, current, hotness)


def test_plans_begin_with_the_uses_they_were_made_from() -> None:
    prior = prior_uses({0: np.arange(32), 1: np.zeros(32)}, 4)
    assert set(prior) == {0} and np.isclose(prior[0].sum(), 4 * PRIOR_TOKENS)
    plan = make_plan(LAYERS, [2, 2, 2, 2], hotness=prior)
    assert plan.layers[0].initial == (31, 30) and plan.layers[0].hotness == tuple(prior[0])
    assert plan.layers[1].initial == () and plan.layers[1].hotness == ()
