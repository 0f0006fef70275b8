"""The simulator against cases worked out by hand, against the optimum by exhaustion, and against itself."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_moe.placement import LayerPlan, ResidencyPlan
from pyspark_moe.routing_trace import Routing
from pyspark_moe.simulator import Belady, Device, Lru, Policy, Ram, Static, simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from synthetic_moe.routing import hot_share  # noqa: E402
from synthetic_moe.traces import Routers  # noqa: E402

SLOW = 1e9  # a half-life that does not matter here
EVERY: tuple[Policy, ...] = (Static(), Lru(), Ram(), Ram(half_life=2), Ram(admit_margin=1.25), Device(delay_steps=0), Device())


def routing(tokens: list[list[int]] | list[int], n_expert: int = 4, steps: list[int] | None = None) -> Routing:
    """One layer; a token is an expert or a list of experts."""
    experts = np.array([t if isinstance(t, list) else [t] for t in tokens], dtype=np.int16)[:, None]
    return Routing(experts, np.array(steps or range(len(tokens) + 1)), (n_expert,))


def plan(n_fast: int, initial: tuple[int, ...] = (), n_pinned: int = 0, hotness: tuple[float, ...] = ()) -> ResidencyPlan:
    return ResidencyPlan((LayerPlan(0, n_fast, n_pinned, initial, hotness),))


def hits(tokens: list[int] | list[list[int]], slots: ResidencyPlan, policy: Policy, **more: object) -> list[int]:
    """Hits of each step."""
    return simulate(routing(tokens, **more), slots, policy, window=1).hits[:, 0].tolist()


def test_lru() -> None:
    assert hits([0, 1, 0, 2, 1, 2], plan(2), Lru()) == [0, 0, 1, 0, 0, 1]


def test_frequency_keeps_what_is_used_more() -> None:
    tokens = [0, 0, 1, 2, 0, 2]
    assert hits(tokens, plan(2), Ram(half_life=SLOW)) == [0, 1, 0, 0, 1, 1]
    assert hits(tokens, plan(2), Lru()) == [0, 1, 0, 0, 0, 1]


def test_frequency_forgets() -> None:
    tokens = [0, 0, 0, 1, 2, 0]
    assert hits(tokens, plan(2), Ram(half_life=SLOW))[-1] == 1
    assert hits(tokens, plan(2), Ram(half_life=0.5))[-1] == 0  # the uses of 0 weigh 4^-2 + 4^-3 + 4^-4, that of 1 4^-1


def test_of_equally_cold_experts_the_longest_unused_leaves_then_the_lowest_number() -> None:
    assert hits([0, 1, 2, 1, 0], plan(2), Ram(half_life=SLOW)) == [0, 0, 0, 1, 0]
    assert hits([3, 2, 1], plan(2, (1, 2)), Ram(half_life=SLOW)) == [0, 1, 0]  # 1 and 2 were never used: 1 left


def test_a_plan_begins_with_uses() -> None:
    seeded = plan(2, (0, 1), 0, (5.0, 3.0, 0.0, 0.0))
    assert hits([2, 0, 1], seeded, Ram(half_life=SLOW)) == [0, 1, 0]
    assert hits([2, 1, 0], plan(2, (0, 1), 0, (3.0, 5.0, 0.0, 0.0)), Ram(half_life=SLOW)) == [0, 1, 0]


def test_pinned_experts_stay() -> None:
    assert hits([2, 3, 2, 0, 3], plan(2, (0, 1), 1), Lru()) == [0, 0, 0, 1, 0]
    assert hits([2, 3, 2, 0, 3], plan(2, (0, 1), 2), Ram()) == [0, 0, 0, 1, 0]
    assert hits([2, 2, 3, 0, 1], plan(2, (0, 1)), Static()) == [0, 0, 0, 1, 1]


def test_admission_by_a_margin() -> None:
    tokens = [0, 0, 0, 1, 0, 1, 1, 1, 1]
    assert hits(tokens, plan(1), Ram(half_life=SLOW)) == [0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert hits(tokens, plan(1), Ram(half_life=SLOW, admit_margin=1.1)) == [0, 1, 1, 0, 1, 0, 0, 0, 0]  # 5 > 4 * 1.1 only at the end
    assert hits(tokens + [1], plan(1), Ram(half_life=SLOW, admit_margin=1.1))[-1] == 1


def test_a_step_that_needs_more_than_fits_takes_free_slots_and_wins_others_by_a_margin_only() -> None:
    prompt = [[0, 1], [0, 2], [3, 2], [3, 2]]  # uses 2 1 3 2
    slots = plan(3, (0, 1), 0, (9.0, 1.0, 0.0, 0.0))
    result = simulate(routing([*prompt, [0, 3], [1, 2]], steps=[0, 4, 5, 6]), slots, Ram(half_life=SLOW), window=1)
    # hits 0, 0 and 1; 2 takes the free slot, being used most; then 3 (2 uses) against 1 (2 uses): not by the margin
    assert result.hits[:, 0].tolist() == [3, 0, 0, 0, 1, 1] and result.bytes_read.tolist() == [2, 0, 0, 0, 1, 1]
    slots = plan(3, (0, 1), 0, (9.0, 0.5, 0.0, 0.0))
    result = simulate(routing([*prompt, [0, 3], [1, 2]], steps=[0, 4, 5, 6]), slots, Ram(half_life=SLOW), window=1)
    assert result.hits[:, 0].tolist() == [3, 0, 0, 0, 2, 1] and result.bytes_read.tolist() == [3, 0, 0, 0, 0, 1]


def test_uses_of_a_batch_may_weigh_by_their_place_in_it() -> None:
    prompt = [0, 0, 0, 1, 2, 1, 2]
    steps = [0, 7, 8]
    alike, by_position = Ram(half_life=1, by_position=False), Ram(half_life=1)
    slots = plan(2, (0, 3), 0, (0.0, 0.0, 0.0, 0.1))  # three experts do not fit: they win slots by a margin
    assert hits([*prompt, 1], slots, alike, steps=steps)[7] == 1 and hits([*prompt, 0], slots, alike, steps=steps)[7] == 1
    assert hits([*prompt, 1], slots, by_position, steps=steps)[7] == 1 and hits([*prompt, 0], slots, by_position, steps=steps)[7] == 0


def test_device_copies_within_its_credit_and_after_a_delay() -> None:
    tokens = [2, 2, 2, 2, 2, 2]
    slots = plan(1, (0,))
    assert hits(tokens, slots, Device(half_life=SLOW, copies_per_read=1, delay_steps=0)) == [0, 1, 1, 1, 1, 1]
    assert hits(tokens, slots, Device(half_life=SLOW, copies_per_read=1)) == [0, 0, 1, 1, 1, 1]
    assert hits(tokens, slots, Device(half_life=SLOW, copies_per_read=0.5, delay_steps=0)) == [0, 0, 1, 1, 1, 1]
    assert hits(tokens, slots, Device(half_life=SLOW, copies_per_read=0.5, credit_max=0.9)) == [0] * 6
    assert hits(tokens, plan(2, (0,)), Device(half_life=SLOW, copies_per_read=0, delay_steps=0)) == [0, 1, 1, 1, 1, 1]  # a free slot
    hot = plan(1, (0,), 0, (3.0, 0.0, 0.0, 0.0))
    assert hits(tokens, hot, Device(half_life=SLOW, margin=1.1, copies_per_read=1, delay_steps=0)) == [0, 0, 0, 0, 1, 1]
    assert hits(tokens, plan(1, (0,), 1), Device(half_life=SLOW, copies_per_read=1)) == [0] * 6


def test_device_moves_at_most_so_many_at_once_and_none_behind_a_large_step() -> None:
    tokens = [[0, 1], [0, 1], [0, 1], [0, 1]]
    assert hits(tokens, plan(2), Device(moves_max=1, delay_steps=0)) == [0, 1, 2, 2]
    assert hits(tokens * 4, plan(2), Device(delay_steps=0), steps=[0, 8, 16])[8] == 0
    assert hits(tokens * 4, plan(2), Device(delay_steps=0, staged_uses=5), steps=[0, 8, 16])[8] == 16


def test_a_victim_of_a_device_is_gone_before_the_expert_is_there() -> None:
    tokens = [2, 0, 2, 0]
    assert hits(tokens, plan(1, (0,)), Device(half_life=SLOW, copies_per_read=1)) == [0, 0, 1, 0]


def test_belady_by_hand() -> None:
    assert hits([0, 1, 2, 0, 1, 2], plan(2), Belady()) == [1, 1, 0, 1, 1, 0]
    assert hits([[0, 1], [2, 3], [0, 1]], plan(2), Belady()) == [2, 0, 2]
    assert hits([0, 1], plan(0), Belady()) == [0, 0]


tokens_strategy = st.integers(1, 2).flatmap(lambda k: st.lists(st.permutations(range(4)).map(lambda p: list(p[:k])), min_size=1, max_size=8))


@settings(max_examples=60)
@given(tokens_strategy, st.integers(0, 4))
def test_belady_is_the_optimum(tokens: list[list[int]], n_fast: int) -> None:
    """Of all ways to keep n_fast of the experts that are resident or were used, by exhaustion."""

    def sets(of: frozenset[int]) -> list[frozenset[int]]:
        return [frozenset(c) for c in itertools.combinations(sorted(of), min(n_fast, len(of)))]

    best = {resident: 0 for resident in sets(frozenset(range(4)))}
    for token in tokens:
        after: dict[frozenset[int], int] = {}
        for resident, n in best.items():
            n += len(resident & set(token))
            for kept in sets(resident | set(token)):
                after[kept] = max(after.get(kept, 0), n)
        best = after
    assert simulate(routing(tokens), plan(n_fast), Belady()).hits.sum() == max(best.values())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Routing, ResidencyPlan]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_layers, n_expert, n_used, n_tokens = draw(st.integers(1, 3)), draw(st.integers(3, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 30))
    experts = np.argsort(rng.random((n_tokens, n_layers, n_expert)) * rng.random(n_expert), axis=2)[:, :, :n_used].astype(np.int16)
    layers = []
    for i in range(n_layers):
        n_fast = int(rng.integers(0, n_expert + 1))
        initial = tuple(rng.permutation(n_expert)[: rng.integers(0, n_fast + 1)].tolist())
        layers.append(LayerPlan(i, n_fast, int(rng.integers(0, len(initial) + 1)), initial, tuple(rng.random(n_expert).tolist()) if rng.random() < 0.5 else ()))
    return Routing(experts, np.arange(n_tokens + 1), (n_expert,) * n_layers), ResidencyPlan(tuple(layers))


@settings(max_examples=60)
@given(cases())
def test_no_policy_beats_belady_and_counts_agree(case: tuple[Routing, ResidencyPlan]) -> None:
    routed, slots = case
    best = simulate(routed, slots, Belady())
    for policy in EVERY:
        result = simulate(routed, slots, policy)
        if not (isinstance(policy, Device) and policy.delay_steps):  # which may bring an expert two steps after its use
            assert (result.hits.sum(axis=0) <= best.hits.sum(axis=0)).all(), policy
        assert np.array_equal(result.uses, best.uses) and result.uses.sum() == routed.experts.size
        assert 0 <= result.hit_rate <= 1 and result.bytes_read.sum() >= result.uses.sum() - result.hits.sum()
        assert result.by_layer.shape == (routed.n_layers,) and np.nanmax(result.over_time) <= 1
    for i, layer in enumerate(slots.layers):
        if layer.n_fast == routed.n_expert[i] == len(layer.initial):
            assert best.by_layer[i] == 1


@settings(max_examples=30)
@given(cases(), st.integers(1, 12))
def test_layers_do_not_depend_on_each_other(case: tuple[Routing, ResidencyPlan], step: int) -> None:
    routed, slots = case
    routed = routed.in_steps_of(step)
    for policy in (Static(), Lru(), Ram(), Ram(admit_margin=1.25), Belady()):
        together = simulate(routed, slots, policy).hits.sum(axis=0).tolist()
        alone = [
            simulate(Routing(routed.experts[:, i : i + 1], routed.steps, routed.n_expert[i : i + 1]), ResidencyPlan(slots.layers[i : i + 1]), policy).hits.sum()
            for i in range(routed.n_layers)
        ]
        assert together == alone, policy


def test_tokens_that_a_layer_did_not_compute_are_no_uses() -> None:
    experts = np.array([[[0], [-1]], [[1], [1]]], dtype=np.int16)
    result = simulate(Routing(experts, np.array([0, 2]), (4, 4)), ResidencyPlan((LayerPlan(0, 2), LayerPlan(1, 2, 0, (1,)))), Ram())
    assert result.uses.tolist() == [[2, 1]] and result.hits.tolist() == [[0, 1]]


def test_windows_and_bytes() -> None:
    result = simulate(routing([0, 1, 0, 1, 0]), plan(2), Ram(), [100], window=2)
    assert result.hits[:, 0].tolist() == [0, 2, 1] and result.uses[:, 0].tolist() == [2, 2, 1]
    assert result.over_time.tolist() == [0, 1, 1] and result.hit_rate == 0.6 and result.hit_rate_after(2) == 1
    assert result.bytes_read.tolist() == [200, 0, 0] and result.bytes_per_token == 40 and result.moves == 2


def test_a_plan_of_another_model_is_refused() -> None:
    for slots in (ResidencyPlan(()), plan(5)):
        with pytest.raises(ValueError, match="does not fit"):
            simulate(routing([0]), slots, Ram())
    with pytest.raises(ValueError, match="expert sizes"):
        simulate(routing([0]), plan(1), Ram(), [1, 2])


def test_synthetic_routing_has_the_skew_and_the_topics_it_is_told() -> None:
    routers = Routers.make(n_layer=3, n_expert=64, n_topics=8, n_token=2048, n_embd=128)
    mixed = routers.route(routers.topics_of_text(4000, 20, 1), 1)
    assert mixed.experts.shape == (4000, 3, 8) and all(abs(hot_share(c) - 0.93) < 0.04 for c in mixed.counts())
    topics = routers.topics_of_text(4000, 500, 1)
    assert 2 <= len(np.unique(topics)) and (np.diff(topics) != 0).sum() < 20
    shares = [hot_share(routers.route(np.full(1000, t), 1).counts()[0], 0.25) for t in range(8)]
    assert np.mean(shares) > hot_share(mixed.counts()[0], 0.25) + 0.05  # one topic is narrower than the mix
    flat = Routers.make(n_layer=2, n_expert=64, n_topics=8, n_token=2048, n_embd=128, layer_skew=(0.0, 1.0))
    counts = flat.route(flat.topics_of_text(4000, 20, 1), 1).counts()
    assert hot_share(counts[0]) < hot_share(counts[1]) - 0.05


@settings(max_examples=30)
@given(cases())
def test_by_position_is_token_by_token_where_steps_have_one_token(case: tuple[Routing, ResidencyPlan]) -> None:
    a, b = (simulate(*case, Ram(half_life=3, by_position=flag)).hits for flag in (False, True))
    assert np.array_equal(a, b)
