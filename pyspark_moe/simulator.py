"""Replays recorded routing through residency policies: what would have been in a fast slot, and how many bytes had moved.

Pure: a Routing and a ResidencyPlan in, counters out. The policies `Ram` and `Device` do what the store does
(native/residency.cpp with residency_policy.cpp and swap_engine.cpp; native/swap_engine_cuda.cpp), in its order and with
its ties, so that their constants can be chosen here; tests/python/test_trace_capture.py holds `Ram` against a real store.
All layers advance together, one step at a time, in arrays [n_layers, n_expert of the largest layer].

Ram     a missed expert takes a free slot or that of the coldest expert, at once
Device  missed experts are copied between steps: by a margin only, within a share of the bytes that steps have missed
Lru     as Ram, but the coldest is the one not used for longest
Static  what the plan begins with stays
Belady  knows the future: keeps what is used soonest. In steps of one token no policy that only brings experts a step has
        used hits more; in larger ones it is the least number of experts read, not of uses
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .placement import ResidencyPlan
from .routing_trace import Routing

HALF_LIFE = 48.0  # tokens; this and the next as in native/residency_policy
REPLACE_MARGIN = 1.25
_WEIGHT_MAX = 1e100
_MAX_ADVANCE = 4096
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Ram:
    """half_life      tokens after which a past use counts half
    admit_margin   0: a missed expert always gets a slot (what the store does); else only when it is so many times hotter
                   than the coldest expert, which then stays
    replace_margin the same for experts that got no slot in their step: they get one between steps
    by_position    uses within a step weigh by their token's place in it, as if tokens came one at a time; False: alike
    """

    half_life: float = HALF_LIFE
    admit_margin: float = 0.0
    replace_margin: float = REPLACE_MARGIN
    by_position: bool = True


@dataclass(frozen=True)
class Device:
    """half_life, margin   as in Ram
    copies_per_read  bytes copied for each byte of experts that steps have missed; credit_max: bytes saved up at most
    moves_max        at once
    delay_steps      steps that run between the choice and the arrival of an expert; its victim is gone at once
    staged_uses      a step with at least so many uses for each expert of a layer is staged: nothing moves behind it
    """

    half_life: float = HALF_LIFE
    margin: float = REPLACE_MARGIN
    copies_per_read: float = 1.0
    credit_max: float = 256e6
    moves_max: int = 64
    delay_steps: int = 1
    staged_uses: float = 4.0


@dataclass(frozen=True)
class Lru:
    """As Ram; the coldest expert is the one whose last use is longest ago."""


@dataclass(frozen=True)
class Static:
    """Nothing moves."""


@dataclass(frozen=True)
class Belady:
    """Keeps the experts whose next use is soonest, out of those resident and those a step has used; begins with the best."""


Policy = Ram | Device | Lru | Static | Belady


@dataclass(frozen=True)
class Simulation:
    """What a replay counted.

    uses, hits  int64 [n_windows, n_layers]: expert uses, and those in a fast slot, by tokens `window` at a time
    bytes_read  float64 [n_windows]: into slots and, for experts without one, from home; an expert once a step
    moves       experts that entered a slot after the start, all layers
    """

    window: int
    uses: np.ndarray
    hits: np.ndarray
    bytes_read: np.ndarray
    moves: int
    n_tokens: int

    @property
    def hit_rate(self) -> float:
        """Over all layers and tokens; 1 when there were none."""
        return _ratio(self.hits.sum(), self.uses.sum())

    def hit_rate_after(self, n_tokens: int) -> float:
        """The same without the first tokens: whole windows that begin at `n_tokens` or later."""
        first = -(-n_tokens // self.window)
        return _ratio(self.hits[first:].sum(), self.uses[first:].sum())

    @property
    def by_layer(self) -> np.ndarray:
        """Hit rate of each layer, float64 [n_layers]."""
        return self.hits.sum(axis=0) / np.maximum(1, self.uses.sum(axis=0))

    @property
    def over_time(self) -> np.ndarray:
        """Hit rate of each window, float64 [n_windows]; NaN where no step began."""
        uses = self.uses.sum(axis=1)
        with np.errstate(invalid="ignore"):
            return np.where(uses > 0, self.hits.sum(axis=1) / uses, np.nan)

    @property
    def bytes_per_token(self) -> float:
        return float(self.bytes_read.sum()) / max(1, self.n_tokens)


def _ratio(hits: int, uses: int) -> float:
    return float(hits) / float(uses) if uses else 1.0


def simulate(routing: Routing, plan: ResidencyPlan, policy: Policy, expert_bytes: Sequence[int] = (), window: int = 64) -> Simulation:
    """Replays `routing` with the slots and the first experts of `plan` (its own policy is not looked at).

    expert_bytes  bytes of one expert of each layer; (): one byte each, so that bytes are experts.
    Raises ValueError when plan and routing are not of one model.
    """
    if len(plan.layers) != routing.n_layers or any(p.n_fast > n or len(p.initial) > p.n_fast for p, n in zip(plan.layers, routing.n_expert)):
        raise ValueError(f"a plan of {len(plan.layers)} layers does not fit routing of {routing.n_layers}")
    if expert_bytes and len(expert_bytes) != routing.n_layers:
        raise ValueError(f"{len(expert_bytes)} expert sizes for {routing.n_layers} layers")
    sizes = np.asarray(expert_bytes if expert_bytes else np.ones(routing.n_layers), dtype=float)
    state = _make_state(routing, plan, policy, sizes)
    n_windows = -(-routing.n_tokens // window) if routing.n_tokens else 0
    uses = np.zeros((n_windows, routing.n_layers), dtype=np.int64)
    hits, bytes_read = np.zeros_like(uses), np.zeros(n_windows)
    for first, n_tokens, step_uses in _steps(routing):
        used = step_uses > 0
        w = first // window
        state.begin(routing.experts[first : first + int(n_tokens.max())])
        uses[w] += step_uses.sum(axis=1)
        hits[w] += (step_uses * state.resident).sum(axis=1)
        bytes_read[w] += state.step(step_uses, used, used & ~state.resident, n_tokens)
    return Simulation(window, uses, hits, bytes_read, state.moves, routing.n_tokens)


def _steps(routing: Routing) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first token, tokens of each layer [n_layers], uses [n_layers, n_expert]) of every step."""
    n_layers, width = routing.n_layers, max(routing.n_expert)
    offsets = np.arange(n_layers)[:, None] * width
    for first, last in zip(routing.steps[:-1].tolist(), routing.steps[1:].tolist()):
        ids = routing.experts[first:last].astype(np.int64)
        is_there = ids >= 0
        uses = np.bincount((ids + offsets)[is_there], minlength=n_layers * width).reshape(n_layers, width)
        yield first, is_there[:, :, 0].sum(axis=0), uses


def _make_state(routing: Routing, plan: ResidencyPlan, policy: Policy, sizes: np.ndarray) -> _State:
    if isinstance(policy, Belady):
        return _BeladyState(routing, plan, sizes)
    if isinstance(policy, Static):
        return _State(routing, plan, sizes)
    if isinstance(policy, Device):
        return _DeviceState(routing, plan, sizes, policy)
    if isinstance(policy, Lru):
        return _RamState(routing, plan, sizes, Ram(), is_lru=True)
    return _RamState(routing, plan, sizes, policy)


class _State:
    """Who is resident, and nothing that changes it."""

    def __init__(self, routing: Routing, plan: ResidencyPlan, sizes: np.ndarray) -> None:
        shape = (routing.n_layers, max(routing.n_expert))
        self.sizes, self.moves = sizes, 0
        self.n_fast = np.array([layer.n_fast for layer in plan.layers])
        self.resident = np.zeros(shape, dtype=bool)
        self.pinned = np.zeros(shape, dtype=bool)
        for i, layer in enumerate(plan.layers):
            self.resident[i, list(layer.initial)] = True
            self.pinned[i, list(layer.initial[: layer.n_pinned])] = True

    def begin(self, experts: np.ndarray) -> None:
        """The selections of a step as the routing has them, [n_tokens, n_layers, n_used]."""

    def step(self, uses: np.ndarray, used: np.ndarray, missed: np.ndarray, n_tokens: np.ndarray) -> float:
        """After the selections of a step are known. All [n_layers, n_expert], n_tokens [n_layers]. Returns the bytes read."""
        return float(missed.sum(axis=1) @ self.sizes)


class _ScoredState(_State):
    """With the use counts of native/residency_policy.cpp."""

    def __init__(self, routing: Routing, plan: ResidencyPlan, sizes: np.ndarray, half_life: float) -> None:
        super().__init__(routing, plan, sizes)
        self.growth = math.pow(2.0, 1.0 / half_life)
        self.weight = np.ones(len(self.resident))
        self.scores = np.zeros(self.resident.shape)
        for i, layer in enumerate(plan.layers):
            self.scores[i, : len(layer.hotness)] = layer.hotness
        self.last_used = np.zeros(self.resident.shape, dtype=np.int64)
        self.tick = 0

    def record(self, uses: np.ndarray, used: np.ndarray, n_tokens: np.ndarray) -> None:
        self.tick += 1
        growth = {n: math.pow(self.growth, min(n, _MAX_ADVANCE)) if n else 1.0 for n in set(n_tokens.tolist())}
        self.weight *= [growth[n] for n in n_tokens.tolist()]
        if self.weight.max() > _WEIGHT_MAX:
            for i in np.flatnonzero(self.weight > _WEIGHT_MAX):
                self.scores[i] /= self.weight[i]
                self.weight[i] = 1.0
        self.scores += (self.weight * self.mean_weight(n_tokens))[:, None] * uses
        self.last_used[used] = self.tick

    def mean_weight(self, n_tokens: np.ndarray) -> np.ndarray | float:
        """What a use within the last n_tokens [n_layers] counts."""
        return 1.0

    def coldest(self, candidates: np.ndarray, rows: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Which of the candidates bool [n_rows, n_expert] of these layers leave first, n [n_rows] of each: coldest, then not
        used for longest, then the lowest number. Bool of the same shape."""
        return _least(candidates, self.scores[rows], self.last_used[rows], n)


def _least(candidates: np.ndarray, first: np.ndarray, second: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The n [n_rows] candidates of each row that are least by (first, second, column)."""
    chosen = np.zeros(candidates.shape, dtype=bool)
    n = np.minimum(n, candidates.sum(axis=1))
    most = int(n.max(initial=0))
    first = np.where(candidates, first, np.inf)
    if most > 6:
        order = np.lexsort((second, first), axis=-1)[:, :most]
        np.put_along_axis(chosen, order, np.arange(most) < n[:, None], axis=1)
        return chosen
    for i in range(most):
        rows = np.flatnonzero(n > i)
        values = first[rows]
        ties = values == values.min(axis=1, keepdims=True)
        if ties.sum() > len(rows):
            ages = np.where(ties, second[rows], _NEVER)
            ties &= ages == ages.min(axis=1, keepdims=True)
        columns = ties.argmax(axis=1)
        chosen[rows, columns] = True
        first[rows, columns] = np.inf
    return chosen


class _RamState(_ScoredState):
    """Slots in RAM: expert_store::acquire, choose_targets, and swap_engine for what got no slot."""

    def __init__(self, routing: Routing, plan: ResidencyPlan, sizes: np.ndarray, policy: Ram, is_lru: bool = False) -> None:
        super().__init__(routing, plan, sizes, policy.half_life)
        self.policy, self.is_lru = policy, is_lru
        self.experts = routing.experts[:0]

    def begin(self, experts: np.ndarray) -> None:
        self.experts = experts

    def record(self, uses: np.ndarray, used: np.ndarray, n_tokens: np.ndarray) -> None:
        if self.policy.by_position and len(self.experts) > 1:
            self._record_by_position()
        else:
            super().record(uses, used, n_tokens)
        if self.is_lru:
            self.scores[used] = self.tick

    def step(self, uses: np.ndarray, used: np.ndarray, missed: np.ndarray, n_tokens: np.ndarray) -> float:
        self.record(uses, used, n_tokens)
        n_missed = missed.sum(axis=1)
        bytes_read = float(n_missed @ self.sizes)
        rows = np.flatnonzero((n_missed > 0) & (self.n_fast > 0))
        if not len(rows):
            return bytes_read
        n_missed, missed = n_missed[rows], missed[rows]
        n_free = self.n_fast[rows] - self.resident[rows].sum(axis=1)
        fits = used[rows].sum(axis=1) <= self.n_fast[rows]  # else a batch would sweep out what decoding needs
        n_victims = np.where(fits, np.maximum(0, n_missed - n_free), 0)
        victims = self.coldest(self.resident[rows] & ~self.pinned[rows] & ~used[rows], rows, n_victims)
        if self.policy.admit_margin > 0:
            entering = self._worth_it(rows, missed, victims, n_free)
        else:
            n_targets = np.minimum(n_missed, n_free) + victims.sum(axis=1)
            entering = missed if (n_targets == n_missed).all() else _least(missed, -uses[rows].astype(float), np.zeros_like(self.last_used[rows]), n_targets)
        self.resident[rows] &= ~victims
        self.resident[rows] |= entering
        self.moves += int(entering.sum())
        left = missed & ~entering
        if self.policy.admit_margin == 0 and left.any():
            for row, layer in enumerate(rows):
                if left[row].any():
                    bytes_read += self._promote(layer, np.flatnonzero(left[row]), uses[layer])
        return bytes_read

    def _record_by_position(self) -> None:
        for ids in self.experts:
            layers = np.flatnonzero(ids[:, 0] >= 0)
            one = np.zeros(self.resident.shape, dtype=np.int64)
            one[layers[:, None], ids[layers]] = 1
            super().record(one, one > 0, np.isin(np.arange(len(ids)), layers).astype(np.int64))

    def _worth_it(self, rows: np.ndarray, missed: np.ndarray, victims: np.ndarray, n_free: np.ndarray) -> np.ndarray:
        """The missed experts that enter by a margin, the hottest for the coldest victim; keeps in `victims` those that leave."""
        entering = np.zeros_like(missed)
        for row, layer in enumerate(rows):
            wanted = sorted(np.flatnonzero(missed[row]), key=lambda e: -self.scores[layer, e])
            entering[row, wanted[: n_free[row]]] = True
            by_heat = sorted(np.flatnonzero(victims[row]), key=lambda e: (self.scores[layer, e], self.last_used[layer, e]))
            victims[row] = False
            for expert, victim in zip(wanted[n_free[row] :], by_heat):
                if self.scores[layer, expert] > self.scores[layer, victim] * self.policy.admit_margin:
                    entering[row, expert] = victims[row, victim] = True
        return entering

    def _promote(self, layer: int, experts: np.ndarray, uses: np.ndarray) -> float:
        """Experts that got no slot, the most used first, for the coldest ones that are colder by a margin. Returns bytes."""
        scores = self.scores[layer]
        heap = [(scores[e], self.last_used[layer, e], e) for e in np.flatnonzero(self.resident[layer] & ~self.pinned[layer])]
        heapq.heapify(heap)
        n_free, n_moves = int(self.n_fast[layer] - self.resident[layer].sum()), 0
        for expert in sorted(experts.tolist(), key=lambda e: (-uses[e], e)):
            if n_free > 0:
                n_free -= 1
            elif heap and scores[expert] > heap[0][0] * self.policy.replace_margin:
                self.resident[layer, heapq.heappop(heap)[2]] = False
            else:
                continue
            self.resident[layer, expert] = True
            heapq.heappush(heap, (scores[expert], self.last_used[layer, expert], expert))
            n_moves += 1
        self.moves += n_moves
        return float(n_moves * self.sizes[layer])


class _DeviceState(_ScoredState):
    """Slots of a device: swap_engine_cuda, one round between two steps."""

    def __init__(self, routing: Routing, plan: ResidencyPlan, sizes: np.ndarray, policy: Device) -> None:
        super().__init__(routing, plan, sizes, policy.half_life)
        self.policy, self.credit = policy, 0.0
        self.n_expert = np.array(routing.n_expert)
        self.waiting = np.zeros(self.resident.shape, dtype=bool)  # missed since the last round
        self.arriving: list[tuple[int, int]] = []
        self.arrive_in = 0

    def step(self, uses: np.ndarray, used: np.ndarray, missed: np.ndarray, n_tokens: np.ndarray) -> float:
        self.record(uses, used, n_tokens)
        bytes_missed = float(missed.sum(axis=1) @ self.sizes)
        self.credit = min(self.credit + self.policy.copies_per_read * bytes_missed, self.policy.credit_max)
        self.waiting |= missed
        if self.arriving:
            self.arrive_in -= 1
            if self.arrive_in > 0:
                return bytes_missed
            self._arrive()
        if (uses.sum(axis=1) >= self.policy.staged_uses * self.n_expert).any():
            return bytes_missed
        copied = self._choose()
        self.arrive_in = self.policy.delay_steps
        if self.arrive_in == 0:
            self._arrive()
        return bytes_missed + copied

    def mean_weight(self, n_tokens: np.ndarray) -> np.ndarray:
        n = np.maximum(1, n_tokens).astype(float)
        return (1 - self.growth**-n) / (n * (1 - 1 / self.growth))

    def _arrive(self) -> None:
        for layer, expert in self.arriving:
            self.resident[layer, expert] = True
        self.arriving = []

    def _choose(self) -> float:
        """Moves for the experts that were missed, the hottest of all layers first. Returns the bytes they copy."""
        self.waiting &= ~self.resident
        candidates = np.argwhere(self.waiting & (self.n_fast < self.n_expert)[:, None] & (self.n_fast > 0)[:, None])
        self.waiting[:] = False
        if not len(candidates):
            return 0.0
        heat = self.scores[candidates[:, 0], candidates[:, 1]] / self.weight[candidates[:, 0]]
        rows = np.unique(candidates[:, 0])
        n_wanted = np.minimum(np.bincount(candidates[:, 0], minlength=len(self.n_fast))[rows], self.policy.moves_max)
        n_free = dict(zip(rows.tolist(), (self.n_fast[rows] - self.resident[rows].sum(axis=1)).tolist()))
        cold = self.coldest(self.resident[rows] & ~self.pinned[rows], rows, n_wanted)
        victims: dict[int, list[int]] = {}
        for row, layer in enumerate(rows.tolist()):
            victims[layer] = sorted(np.flatnonzero(cold[row]).tolist(), key=lambda e: (self.scores[layer, e], self.last_used[layer, e], e), reverse=True)
        copied = 0.0
        for i in np.argsort(-heat, kind="stable"):
            if len(self.arriving) >= self.policy.moves_max:
                break
            layer, expert = candidates[i].tolist()
            if n_free[layer] > 0:
                n_free[layer] -= 1
            else:
                if self.credit < self.sizes[layer] or not victims[layer]:
                    continue
                victim = victims[layer][-1]
                if not self.scores[layer, expert] > self.scores[layer, victim] * self.policy.margin:
                    continue
                self.credit -= self.sizes[layer]
                victims[layer].pop()
                self.resident[layer, victim] = False
            self.arriving.append((layer, expert))
            copied += float(self.sizes[layer])
        self.moves += len(self.arriving)
        return copied


class _BeladyState(_State):
    """Knows when each expert is used next."""

    def __init__(self, routing: Routing, plan: ResidencyPlan, sizes: np.ndarray) -> None:
        super().__init__(routing, plan, sizes)
        used = [np.flatnonzero(uses) for _, _, uses in _steps(routing)]
        self.next_use = np.full(self.resident.shape, _NEVER)
        flat = self.next_use.reshape(-1)
        self.coming: list[tuple[np.ndarray, np.ndarray]] = []  # of each step, last one first: experts, and their use after it
        for step in range(len(used) - 1, -1, -1):
            self.coming.append((used[step], flat[used[step]].copy()))
            flat[used[step]] = step
        exists = np.arange(self.resident.shape[1]) < np.array(routing.n_expert)[:, None]
        self.resident = self._soonest(exists)

    def _soonest(self, candidates: np.ndarray) -> np.ndarray:
        return _least(candidates, self.next_use.astype(float), np.zeros_like(self.next_use), self.n_fast)

    def step(self, uses: np.ndarray, used: np.ndarray, missed: np.ndarray, n_tokens: np.ndarray) -> float:
        flat, after = self.coming.pop()
        self.next_use.reshape(-1)[flat] = after
        before = self.resident
        rows = np.flatnonzero(missed.any(axis=1))
        if len(rows):
            candidates = before[rows] | used[rows]
            over = candidates.sum(axis=1) - self.n_fast[rows]
            leaving = _least(candidates, -self.next_use[rows].astype(float), np.zeros_like(self.next_use[rows]), np.maximum(0, over))
            self.resident[rows] = candidates & ~leaving
            self.moves += int((self.resident[rows] & missed[rows]).sum())
        return float(missed.sum(axis=1) @ self.sizes)
