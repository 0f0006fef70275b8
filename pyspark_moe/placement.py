"""How many fast slots each layer gets, and which experts start in them. Pure: values in, values out.

The memory of expert weights on the CPU has two parts:
* fast slots, resident all the time, in whole pages;
* the window: a step that touches more experts of a layer than it has fast slots (a prompt does) reads the others through
  the file mapping and gives them back after the layer. One layer at a time does that, so the window is the largest
  layer's experts that are not fast.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .model_info import ExpertLayer

PAGE = 4096
# Less than the half-life of native/residency_policy.h: known experts start in the slots, and new traffic wins soon.
# Measured: docs/decisions/0042.
PRIOR_TOKENS = 32


@dataclass(frozen=True)
class LayerPlan:
    """Fast slots of one layer. `initial`: experts that start in them, hottest first; the first `n_pinned` never leave.
    `hotness`: uses of each expert that the policy begins with, [n_expert]; (): none, or what it has learned so far."""

    layer: int
    n_fast: int
    n_pinned: int = 0
    initial: tuple[int, ...] = ()
    hotness: tuple[float, ...] = ()


@dataclass(frozen=True)
class ResidencyPlan:
    """What a store is told before its model is loaded, or on a GPU afterwards.

    seed           of the chaos policy
    staging_bytes  on a GPU: its memory for bringing experts ahead of their layer; -1 (default): all it is good for
    """

    layers: tuple[LayerPlan, ...]
    policy: str = "frequency"
    seed: int = 0
    staging_bytes: int = -1

    @property
    def n_fast(self) -> int:
        """Fast slots of all layers."""
        return sum(layer.n_fast for layer in self.layers)


def fast_bytes(layer: ExpertLayer, n_fast: int) -> int:
    """Bytes that `n_fast` fast slots occupy: each tensor in whole pages, plus one where it does not start on a page."""
    if n_fast == 0:
        return 0
    return sum((-(-n_fast * stride // PAGE) + 1) * PAGE for stride in layer.strides)


def window_bytes(layer: ExpertLayer, n_fast: int) -> int:
    """Bytes that the experts without a fast slot occupy while a large step reads them: an expert shares its edge pages."""
    n_home = layer.n_expert - n_fast
    return sum(n_home * (stride + PAGE) for stride in layer.strides) if n_home else 0


def resident_bytes(layers: Sequence[ExpertLayer], n_fast: Sequence[int]) -> int:
    """The most that expert weights occupy with these fast slots, in the order of `layers`."""
    fast = sum(fast_bytes(layer, n) for layer, n in zip(layers, n_fast))
    return fast + max((window_bytes(layer, n) for layer, n in zip(layers, n_fast)), default=0)


def smallest_budget(layers: Sequence[ExpertLayer], n_expert_used: int) -> int:
    """Bytes of the smallest budget that works: the experts of one token fit the fast slots of every layer."""
    return resident_bytes(layers, [min(n_expert_used, layer.n_expert) for layer in layers])


def uniform_slots(layers: Sequence[ExpertLayer], budget: int, floor: int) -> list[int] | None:
    """As many fast slots as fit `budget` bytes, the same in every layer; what is left goes to the first layers, one each.

    None when not even `floor` slots in every layer fit.
    """

    def slots(n: int) -> list[int]:
        return [min(n, layer.n_expert) for layer in layers]

    if resident_bytes(layers, slots(floor)) > budget:
        return None
    low, high = floor, max((layer.n_expert for layer in layers), default=floor)
    while low < high:  # resident_bytes grows with n: a slot costs at least what it takes from the window
        middle = (low + high + 1) // 2
        if resident_bytes(layers, slots(middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    chosen = slots(low)
    for i, layer in enumerate(layers):
        if chosen[i] < layer.n_expert:
            chosen[i] += 1
            if resident_bytes(layers, chosen) > budget:
                chosen[i] -= 1
                break
    return chosen


def greedy_slots(layers: Sequence[ExpertLayer], budget: int, floor: int, hotness: Mapping[int, np.ndarray]) -> list[int] | None:
    """Fast slots by uses per byte: the next slot goes where the next expert is used most for its size.

    hotness  layer number -> uses of each expert, float or int [n_expert]; a layer that is missing counts as unused.
    Every layer gets `floor` slots first, since a layer without them would read every token's experts from its home.
    None when the floor does not fit. Ties go to the earlier layer, so the same input gives the same output. The first slot that
    does not fit ends it: slots come in an order that does not depend on the budget, and a larger budget never takes a slot
    from any layer.
    """
    chosen = [min(floor, layer.n_expert) for layer in layers]
    fast = [fast_bytes(layer, n) for layer, n in zip(layers, chosen)]
    windows = [window_bytes(layer, n) for layer, n in zip(layers, chosen)]
    if sum(fast) + max(windows, default=0) > budget:
        return None
    ranked = [np.sort(np.asarray(hotness.get(layer.layer, np.zeros(layer.n_expert)), dtype=float))[::-1] for layer in layers]

    def gain(i: int) -> tuple[float, int]:
        return (-float(ranked[i][chosen[i]]) / layers[i].expert_bytes, i)

    heap = [gain(i) for i, layer in enumerate(layers) if chosen[i] < layer.n_expert]
    heapq.heapify(heap)
    total_fast = sum(fast)
    while heap:
        _, i = heapq.heappop(heap)
        new_fast, new_window = fast_bytes(layers[i], chosen[i] + 1), window_bytes(layers[i], chosen[i] + 1)
        windows[i] = new_window
        if total_fast - fast[i] + new_fast + max(windows) > budget:
            break
        total_fast += new_fast - fast[i]
        fast[i] = new_fast
        chosen[i] += 1
        if chosen[i] < layers[i].n_expert:
            heapq.heappush(heap, gain(i))
    return chosen


def prior_uses(counts: Mapping[int, np.ndarray], n_expert_used: int) -> dict[int, np.ndarray]:
    """Counts of any length of traffic as the uses of its last PRIOR_TOKENS tokens, float64 [n_expert] by layer: what a policy
    begins with, weak enough that a few hundred tokens of other traffic outweigh it. Layers without uses are left out."""
    result = {}
    for layer, given in counts.items():
        uses = np.asarray(given, dtype=float)
        total = float(uses.sum())
        if total > 0:
            result[layer] = uses * (PRIOR_TOKENS * n_expert_used / total)
    return result


def make_plan(
    layers: Sequence[ExpertLayer],
    n_fast: Sequence[int],
    *,
    policy: str = "frequency",
    seed: int = 0,
    hotness: Mapping[int, np.ndarray] | None = None,
    fill: bool = False,
) -> ResidencyPlan:
    """The plan for these fast slots, in the order of `layers`. With hotness (see prior_uses) the hottest experts start in
    them, and the policy begins with it; without, slots fill with the first experts that are missed, unless there is one for every expert, none ever moves, or `fill`
    says that any expert is better than none: then they start with the experts of the lowest numbers."""
    plans = []
    for layer, n in zip(layers, n_fast):
        uses = None if hotness is None or layer.layer not in hotness else np.asarray(hotness[layer.layer], dtype=float)
        if n >= layer.n_expert:
            initial: tuple[int, ...] = tuple(range(layer.n_expert))
        elif uses is not None:
            initial = tuple(int(e) for e in np.argsort(-uses, kind="stable")[:n])
        else:
            initial = tuple(range(n)) if fill or policy == "static" else ()
        plans.append(LayerPlan(layer.layer, n, 0, initial, () if uses is None else tuple(uses.tolist())))
    return ResidencyPlan(tuple(plans), policy, seed)
