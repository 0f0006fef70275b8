"""Rates from the counters of /spark/stats "total": hits, bytes a token, curves. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """What the counters of /spark/stats "total" counted between two readings."""
    names = ("uses", "hits", "misses", "bytes_home", "bytes_ahead", "bytes_read", "reads_home", "reads_ahead", "promotions", "steps", "steps_replayed")
    return {name: after[name] - before[name] for name in names if name in after}


def add(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sums of several such counts."""
    return {name: sum(c[name] for c in counts) for name in counts[0]}


def per_token(counts: Mapping[str, int], uses_per_token: int) -> dict[str, float]:
    """Rates from counts. uses_per_token: MoE layers x experts used; so tokens are those that were routed, exactly."""
    uses = max(1, counts["uses"])
    tokens = uses / uses_per_token
    result = {"hit_rate": counts["hits"] / uses}
    for name in ("misses", "bytes_home", "bytes_ahead", "bytes_read", "reads_home", "reads_ahead", "promotions"):
        if name in counts:
            result[f"{name}_per_token"] = counts[name] / tokens
    if counts.get("steps"):
        result["steps_replayed"] = counts["steps_replayed"] / counts["steps"]  # as a CUDA graph
    return result


def curve(readings: Sequence[Mapping[str, Any]], uses_per_token: int, start: float = 0.0) -> list[dict[str, float]]:
    """Hit rate between consecutive readings; "tokens" counts from `start` to the end of the interval."""
    points, tokens = [], start
    for before, after in zip(readings, readings[1:]):
        counts = between(before, after)
        if counts["uses"] > 0:
            n = counts["uses"] / uses_per_token
            tokens += n
            rates = per_token(counts, uses_per_token)
            points.append({"tokens": round(tokens, 2), "n": round(n, 2), "hit_rate": round(rates["hit_rate"], 4),
                           "promotions_per_token": round(rates["promotions_per_token"], 3)})  # fmt: skip
    return points


def level(points: Sequence[Mapping[str, float]], last_tokens: float) -> float | None:
    """Mean hit rate over about the last `last_tokens` tokens of a curve; None for a shorter one."""
    n, hits = 0.0, 0.0
    for point in reversed(points):
        n += point["n"]
        hits += point["n"] * point["hit_rate"]
        if n >= last_tokens:
            return hits / n
    return None


def is_steady(points: Sequence[Mapping[str, float]], window: float = 128, within: float = 0.01) -> bool:
    """True when the last window's hit rate is that of the window before, up to `within`."""
    late, both = level(points, window), level(points, 2 * window)
    return late is not None and both is not None and abs(late - both) <= within / 2


def recovery_tokens(points: Sequence[Mapping[str, float]], steady: float | None, within: float = 0.02) -> float | None:
    """Tokens until the hit rate first comes within `within` of its steady level; None when it does not."""
    if steady is None:
        return None
    return next((point["tokens"] for point in points if point["hit_rate"] >= steady - within), None)
