"""Whether fast slots should move between layers because routing has drifted, and how far. Pure: values in, values out.

Within a layer the policy follows the traffic by itself. How many slots each layer has is fixed when experts are placed;
this says when placing them anew is worth it: not for a gain that noise could explain, and only some of the slots at a
time, so that a short detour of the traffic costs little and what serves well is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .model_info import ExpertLayer


@dataclass(frozen=True)
class RebalanceLimits:
    """When and how far slots move.

    tokens      of traffic since experts were last placed, at least; default 4096
    least_gain  of the share of uses that the slots cover, 0 to 1; default 0.01
    most_moves  share of all slots that change their layer at a time, 0 to 1; default 0.05
    """

    tokens: int = 4096
    least_gain: float = 0.01
    most_moves: float = 0.05


def covered_share(layers: Sequence[ExpertLayer], n_fast: Sequence[int], hotness: Mapping[int, np.ndarray]) -> float:
    """Share of all uses, 0 to 1, whose expert is among the hottest `n_fast` of its layer; 1 without uses."""
    total = covered = 0.0
    for layer, n in zip(layers, n_fast):
        uses = np.sort(np.asarray(hotness.get(layer.layer, np.zeros(layer.n_expert)), dtype=float))[::-1]
        total += float(uses.sum())
        covered += float(uses[:n].sum())
    return covered / total if total else 1.0


def rebalance(
    layers: Sequence[ExpertLayer],
    current: Sequence[int],
    best: Sequence[int],
    hotness: Mapping[int, np.ndarray],
    fits: Callable[[Sequence[int]], bool],
    limits: RebalanceLimits = RebalanceLimits(),
) -> list[int] | None:
    """Slots of each layer after a bounded step from `current` towards `best`; None when it is not worth it.

    best  what placement would choose for `hotness`, in the order of `layers`
    fits  whether these slots keep the budget; `current` does
    """
    if covered_share(layers, best, hotness) - covered_share(layers, current, hotness) < limits.least_gain:
        return None
    wanted = [b - c for b, c in zip(best, current)]
    growth = sum(d for d in wanted if d > 0)
    allowed = int(limits.most_moves * sum(current))
    if growth == 0 or allowed == 0:
        return None
    share = min(1.0, allowed / growth)
    chosen = [c + math.floor(d * share) for c, d in zip(current, wanted)]  # shrinking is rounded up, growing down
    # whole slots: what does not fit grows less, the layer that gains least first
    growing = sorted((i for i, d in enumerate(wanted) if d > 0), key=lambda i: wanted[i])
    while not fits(chosen):
        i = next((i for i in growing if chosen[i] > current[i]), None)
        if i is None:
            return None
        chosen[i] -= 1
    if chosen == list(current) or covered_share(layers, chosen, hotness) <= covered_share(layers, current, hotness):
        return None
    return chosen
