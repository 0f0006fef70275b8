"""Paired rounds: A B, B A, A B ..., so that a slow minute of the machine hits all arms. The ratio of two arms is the median
over rounds of the ratio within a round, with its quartiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Metrics = Mapping[str, float]
T = TypeVar("T")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile)."""
    if len(values) < 2:
        return (values[0],) * 3
    q = statistics.quantiles(values, n=4, method="inclusive")
    return q[0], statistics.median(values), q[2]


@dataclass
class Paired:
    """Rounds of several arms. rounds[i][arm][metric] is a number; higher or lower is better as the metric's name says."""

    arms: tuple[str, ...]
    rounds: list[dict[str, dict[str, float]]] = field(default_factory=list)

    def median(self, arm: str, metric: str) -> float:
        return statistics.median(r[arm][metric] for r in self.rounds)

    def ratio(self, arm: str, base: str, metric: str) -> dict[str, float]:
        """arm / base within rounds: median and quartiles."""
        low, middle, high = quartiles([r[arm][metric] / r[base][metric] for r in self.rounds])
        return {"median": middle, "lower_quartile": low, "upper_quartile": high}

    def summary(self, base: str) -> dict[str, Any]:
        """Medians of every arm and ratios to `base`."""
        metrics = list(self.rounds[0][base])
        return {
            "rounds": len(self.rounds),
            "base": base,
            "medians": {arm: {m: self.median(arm, m) for m in metrics} for arm in self.arms},
            "ratios": {arm: {m: self.ratio(arm, base, m) for m in metrics} for arm in self.arms if arm != base},
        }


def in_turn(arms: Sequence[T], number: int) -> list[T]:
    """The arms in the order of round `number`: turned in every second one, so that no arm always comes first."""
    return list(arms) if number % 2 == 0 else list(reversed(arms))


def run_paired(
    arms: Mapping[str, Callable[[], Metrics]],
    rounds: int,
    *,
    warmup: int = 1,
    pause_s: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
    into: Paired | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Paired:
    """Runs `rounds` rounds after `warmup` that are thrown away. stop: asked before every round, true ends them early. into:
    collects here, so that a round that fails loses itself only. progress: gets a line after every round."""
    result = Paired(tuple(arms)) if into is None else into
    for number in range(-warmup, rounds):
        if stop():
            progress(f"stopped before round {number + 1} of {rounds}")
            break
        measured = {}
        for name in in_turn(tuple(arms), number):
            measured[name] = dict(arms[name]())
            time.sleep(pause_s)
        if number >= 0:
            result.rounds.append({name: measured[name] for name in arms})
        progress(f"round {number + 1}/{rounds}: " + ", ".join(f"{n} {format_metrics(measured[n])}" for n in arms))
    return result


def format_metrics(metrics: Metrics) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in metrics.items())
