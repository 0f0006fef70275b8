"""The arithmetic of bench_cuda.py: slots of a share, layers for --n-cpu-moe, predicted speed, curves, claims. Values in, values out."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

GIB = 2**30
# What issue 3 promises: ratios of decode or prefill speed, at least.
ALL_RESIDENT, WARM_60, PREFILL_60, TWICE, OF_PREDICTED = 0.99, 0.95, 0.95, 2.0, 0.9


class Layer(Protocol):
    """A MoE layer as pyspark_moe.model_info describes it."""

    layer: int
    n_expert: int
    expert_bytes: int
    total_bytes: int


def slots_for_share(layers: Sequence[Layer], share: float) -> int:
    """Fast slots in every layer that keep `share` (0 to 1) of the experts."""
    return round(share * max(layer.n_expert for layer in layers))


def resident_bytes(layers: Sequence[Layer], slots: int) -> int:
    """Bytes of the experts in `slots` fast slots of every layer."""
    return sum(min(slots, layer.n_expert) * layer.expert_bytes for layer in layers)


def n_cpu_moe(layers: Sequence[Layer], limit_bytes: float) -> int:
    """The smallest --n-cpu-moe M, which keeps the experts of blocks 0..M-1 in RAM, such that the others' experts are at most
    `limit_bytes`."""
    kept = sum(layer.total_bytes for layer in layers)
    if kept <= limit_bytes:
        return 0
    for layer in layers:
        kept -= layer.total_bytes
        if kept <= limit_bytes:
            return layer.layer + 1
    return layers[-1].layer + 1


def kept_bytes(layers: Sequence[Layer], m: int) -> int:
    """Bytes of experts on the GPU with --n-cpu-moe m."""
    return sum(layer.total_bytes for layer in layers if layer.layer >= m)


def limit_from_memory(layers: Sequence[Layer], base_memory: int, limit_memory: int) -> int:
    """Bytes of experts that stock may keep on the GPU so that its process stays within `limit_memory`, when it takes
    `base_memory` with all of them there."""
    return sum(layer.total_bytes for layer in layers) - max(0, base_memory - limit_memory)


def more_layers(layers: Sequence[Layer], m: int, excess_bytes: int) -> int:
    """--n-cpu-moe for a process that took `excess_bytes` too many with m."""
    return n_cpu_moe(layers, kept_bytes(layers, m) - excess_bytes)


def predicted_per_s(base_per_s: float, missed_bytes: float, bandwidth: float) -> float:
    """Tokens/s when a token takes the all-GPU time and its missed bytes cross the bus after that. bandwidth: bytes/s."""
    return 1 / (1 / base_per_s + missed_bytes / bandwidth)


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


@dataclass(frozen=True)
class Comparison:
    """One of our arms against its bases: ratios are medians over rounds, None where the other arm is missing.

    share         of the experts that have a fast slot, 0 to 1
    budget_gib    of --spark-vram; None for an arm that is sized by slots
    memory_bytes  device memory of the process, None where it cannot be measured
    """

    arm: str
    share: float
    decode_over_base: float
    prefill_over_base: float
    decode_over_counterpart: float | None = None
    decode_over_predicted: float | None = None
    same_text: float | None = None
    budget_gib: float | None = None
    memory_bytes: int | None = None


def _claim(text: str, arm: str, value: float | None, goal: float, *, at_most: bool = False, strictly: bool = False) -> dict[str, Any]:
    holds = None
    if value is not None and not math.isnan(value):
        holds = value <= goal if at_most else value > goal if strictly else value >= goal
    return {"claim": text, "arm": arm, "value": value, "goal": goal, "sign": "<=" if at_most else ">" if strictly else ">=", "holds": holds}


def claims(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """What is promised about these arms, and whether it holds; None: not measured."""
    result = []
    for c in found:
        if c.share >= 1 and c.budget_gib is None:
            result.append(_claim("decode / stock all on GPU", c.arm, c.decode_over_base, ALL_RESIDENT))
        else:
            if c.share >= 0.595:
                result.append(_claim("decode / stock all on GPU, 60 %", c.arm, c.decode_over_base, WARM_60))
                result.append(_claim("prefill / stock all on GPU, 60 %", c.arm, c.prefill_over_base, PREFILL_60))
            result.append(_claim("decode / stock --n-cpu-moe, same memory", c.arm, c.decode_over_counterpart, 1.0, strictly=True))
            if c.share >= 0.395:
                result.append(_claim("decode / stock --n-cpu-moe, 40 % up", c.arm, c.decode_over_counterpart, TWICE))
            result.append(_claim("decode / (all-GPU time + missed bytes / PCIe)", c.arm, c.decode_over_predicted, OF_PREDICTED))
        if c.budget_gib is not None:
            used = None if c.memory_bytes is None else c.memory_bytes / GIB
            result.append(_claim("GiB of device memory", c.arm, used, c.budget_gib, at_most=True))
        result.append(_claim("share of answers equal to stock's", c.arm, c.same_text, 1.0))
    return result


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Claims for people."""
    lines = []
    for claim in found:
        value = "-" if claim["value"] is None else f"{claim['value']:.3f}"
        word = {True: "holds", False: "MISSED", None: "not measured"}[claim["holds"]]
        lines.append(f"{claim['arm']:14} {claim['claim']:48} {value:>8} {claim['sign']:>2} {claim['goal']:<5g} {word}")
    return "\n".join(lines)


def speed_table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Medians of every arm for people."""
    lines = [f"{'arm':14} {'decode/s':>9} {'prefill/s':>9} {'ttft ms':>8} {'hit rate':>8} {'MB bus':>8} {'promoted':>8} {'GiB':>6}  a token; GPU memory"]
    for name, arm in arms.items():
        m = arm["medians"]
        values = (m.get("decode_per_s"), m.get("prefill_per_s"), m.get("ttft_ms"), m.get("hit_rate"), _scaled(_bus_bytes(m), 1e6),
                  m.get("promotions_per_token"), _scaled(arm["memory_bytes"], GIB))  # fmt: skip
        formats = ("9.1f", "9.0f", "8.1f", "8.4f", "8.3f", "8.3f", "6.2f")
        cells = ["-".rjust(int(f.split(".")[0])) if v is None else format(v, f) for v, f in zip(values, formats)]
        note = f"  --n-cpu-moe {arm['n_cpu_moe']}" if "n_cpu_moe" in arm else ""
        lines.append(f"{name:14} " + " ".join(cells) + note)
    return "\n".join(lines)


def _bus_bytes(medians: Mapping[str, Any]) -> float | None:
    """Bytes of experts that a token brought over the bus: read in place, and copied ahead of their layer."""
    home = medians.get("bytes_home_per_token")
    return None if home is None else home + medians.get("bytes_ahead_per_token", 0)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit
