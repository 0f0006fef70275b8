"""The arithmetic of bench_cuda.py: predicted speed, claims; with that of pyspark_moe.measure. Values in, values out."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common  # noqa: F401  finds the package
from pyspark_moe.measure.rates import add, between, curve, is_steady, level, per_token, recovery_tokens
from pyspark_moe.measure.sizes import kept_bytes, limit_from_memory, more_layers, n_cpu_moe, resident_bytes, slots_for_share

__all__ = [
    "Comparison", "add", "between", "claims", "curve", "is_steady", "kept_bytes", "level", "limit_from_memory", "more_layers", "n_cpu_moe",
    "per_token", "predicted_per_s", "recovery_tokens", "resident_bytes", "slots_for_share", "speed_table", "table",
]

GIB = 2**30
# What issue 3 promises: ratios of decode or prefill speed, at least.
ALL_RESIDENT, WARM_60, PREFILL_60, TWICE, OF_PREDICTED = 0.99, 0.95, 0.95, 2.0, 0.9


def predicted_per_s(base_per_s: float, missed_bytes: float, bandwidth: float) -> float:
    """Tokens/s when a token takes the all-GPU time and its missed bytes cross the bus after that. bandwidth: bytes/s."""
    return 1 / (1 / base_per_s + missed_bytes / bandwidth)


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
