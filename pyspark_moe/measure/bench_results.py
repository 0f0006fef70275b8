"""What `pyspark-moe bench` has found, as JSON and as a table. Values in, values out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import GIB
from .bench_arms import ALL_RESIDENT, Arm, offload_of
from .decoding import BYTES, first_difference
from .paired import Paired
from .server import Answer

RATIOS = ("decode_per_s", "wall_decode_per_s", "ttft_ms", "prefill_per_s", "prefill_ttft_ms")


def metrics_of(measured: Mapping[str, float]) -> dict[str, float]:
    """A round with bytes_per_token: what a token brought from home, in place, ahead of its layer or into a slot."""
    known = [measured[f"{name}_per_token"] for name in BYTES if f"{name}_per_token" in measured]
    return {**measured, **({"bytes_per_token": sum(known)} if known else {})}


@dataclass
class Found:
    """rounds: metrics of each arm, by round; answers: (round, arm) -> its answers; facts: of the servers; left_out: arm -> why."""

    arms: tuple[Arm, ...]
    rounds: list[dict[str, dict[str, float]]] = field(default_factory=list)
    answers: dict[tuple[int, str], list[Answer]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, number: int, arm: str, metrics: dict[str, float], answers: list[Answer]) -> None:
        while len(self.rounds) <= number:
            self.rounds.append({})
        self.rounds[number][arm] = metrics
        self.answers[number, arm] = answers

    def of(self, arm: str) -> list[dict[str, float]]:
        """The rounds of an arm."""
        return [found[arm] for found in self.rounds if arm in found]

    @property
    def reference(self) -> str | None:
        """The arm that tokens are compared with: the first that was measured of those that must agree; None before that."""
        return next((arm.name for arm in self.arms if not arm.inexact and self.of(arm.name)), None)


def ratio(found: Found, arm: str, base: str | None) -> dict[str, dict[str, float]] | None:
    """arm / base within rounds, median and quartiles of each metric; None where they share no round."""
    if base is None or base == arm:
        return None
    both = [r for r in found.rounds if arm in r and base in r]
    paired = Paired((arm, base), both)
    return {m: paired.ratio(arm, base, m) for m in RATIOS if all(r[base][m] for r in both)} if both else None


def compared(found: Found, arm: str) -> tuple[dict[str, int | None] | None, float | None]:
    """(where its tokens first differ from the reference's, share of answers that are the same); (None, None) where there is
    nothing to compare."""
    base = found.reference
    pairs = [(number, mine, found.answers[number, base]) for (number, name), mine in sorted(found.answers.items()) if name == arm and (number, base) in found.answers]
    if base is None or not pairs:
        return None, None
    differs = None
    for number, mine, theirs in pairs:
        where = first_difference(theirs, mine)
        if where is not None:
            differs = {"round": number, "request": where.request, "token": where.token}
            break
    same = [a.content == b.content for _, mine, theirs in pairs for a, b in zip(mine, theirs)]
    return differs, sum(same) / len(same)


def unequal(found: Found) -> list[str]:
    """Arms whose tokens must be the reference's and are not."""
    return [arm.name for arm in found.arms if not arm.inexact and compared(found, arm.name)[0] is not None]


def results(found: Found) -> dict[str, Any]:
    """For the result file."""
    arms = {}
    for arm in found.arms:
        rounds = found.of(arm.name)
        if not rounds and arm.name not in found.facts:
            continue
        differs, same = compared(found, arm.name)
        offload = offload_of(found.arms, arm)
        arms[arm.name] = {
            "flags": [Path(word).name if "/" in word else word for word in arm.flags],  # no paths of this machine
            **found.facts.get(arm.name, {}),
            "rounds": len(rounds),
            "medians": {name: statistics.median(r[name] for r in rounds) for name in rounds[0] if all(name in r for r in rounds)} if rounds else {},
            "over_all_resident": ratio(found, arm.name, ALL_RESIDENT),
            "offload": offload,
            "over_offload": ratio(found, arm.name, offload),
            "must_equal_reference": not arm.inexact,
            "why_not": arm.inexact or None,
            "differs_at": differs,
            "same_answers": same,
        }
    names = [arm.name for arm in found.arms if not arm.inexact and compared(found, arm.name)[1] is not None]
    return {
        "reference": found.reference,
        "exact": not unequal(found) if len(names) > 1 else None,
        "arms": arms,
        "left_out": found.left_out,
        "rounds": found.rounds,
    }


_COLUMNS = (("tokens/s", 9), ("/all", 5), ("/offload", 8), ("prefill/s", 9), ("/all", 5), ("/offload", 8), ("ttft ms", 8), ("hit rate", 8), ("MB/token", 8),
            ("promoted", 8), ("GiB", 7))  # fmt: skip
_FORMATS = ("9.1f", "5.2f", "8.2f", "9.0f", "5.2f", "8.2f", "8.1f", "8.4f", "8.3f", "8.3f", "7.2f")


def table(found: Mapping[str, Any]) -> list[str]:
    """What results() gave, for people."""
    width = max([12, *map(len, found["arms"])])
    lines = [" ".join([f"{'arm':{width}}", *(name.rjust(n) for name, n in _COLUMNS)]) + "  greedy tokens"]
    for name, arm in found["arms"].items():
        m, base, offload = arm["medians"], arm["over_all_resident"] or {}, arm["over_offload"] or {}
        values = (m.get("decode_per_s"), _median(base, "decode_per_s"), _median(offload, "decode_per_s"), m.get("prefill_per_s"), _median(base, "prefill_per_s"),
                  _median(offload, "prefill_per_s"), m.get("ttft_ms"), m.get("hit_rate"), _scaled(m.get("bytes_per_token"), 1e6),
                  m.get("promotions_per_token"), _scaled(arm.get("memory_bytes"), GIB))  # fmt: skip
        cells = ["-".rjust(n) if value is None else format(value, form) for value, form, (_, n) in zip(values, _FORMATS, _COLUMNS)]
        lines.append(" ".join([f"{name:{width}}", *cells]) + "  " + _tokens(name, arm, found["reference"]))
    notes = [f"{name}: --n-cpu-moe {arm['n_cpu_moe']}, matched by {arm['matched_by']}" for name, arm in found["arms"].items() if "n_cpu_moe" in arm]
    notes += [f"{name} is not expected to give equal tokens: {arm['why_not']}" for name, arm in found["arms"].items() if arm["why_not"]]
    notes += [f"{name} is left out: {why}" for name, why in found["left_out"].items()]
    return [*lines, *notes]


def _tokens(name: str, arm: Mapping[str, Any], reference: str | None) -> str:
    if name == reference:
        return "reference"
    if arm["same_answers"] is None:
        return "not compared"
    if arm["differs_at"] is None:
        return "the same"
    if not arm["must_equal_reference"]:
        return f"{arm['same_answers']:.0%} of answers the same"
    where = arm["differs_at"]
    return f"DIFFER in round {where['round'] + 1}, request {where['request'] + 1}" + ("" if where["token"] is None else f", token {where['token'] + 1}")


def _median(ratios: Mapping[str, Mapping[str, float]], name: str) -> float | None:
    return ratios[name]["median"] if name in ratios else None


def _scaled(value: float | Sequence[float] | None, unit: float) -> float | None:
    return None if value is None else value / unit
