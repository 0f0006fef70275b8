"""How much of a model's experts a share, or an amount of memory, is: slots, and llama-server's --n-cpu-moe. Values in, values out."""

from __future__ import annotations

from collections.abc import Sequence

from ..model_info import ExpertLayer as Layer


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
