"""How many fast slots each layer gets on a GPU, and what they cost there. Pure; native/stack_memory_cuda.cpp allocates alike.

Every expert tensor has its own range of device memory, in whole pages of 2 MiB, with padding that matrix kernels read.
Experts without a slot are read from pinned RAM; a large step has them copied into staging memory, two layers in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from .model_info import ExpertLayer

PAGE = 2 * 1024**2
PADDING = 128 * 1024
RING_SLOTS = 16  # of a layer, for experts that small steps bring ahead


def _pages(n_bytes: int) -> int:
    """n_bytes in whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def slot_bytes(layer: ExpertLayer, n_fast: int) -> int:
    """Bytes of device memory that `n_fast` fast slots of a layer occupy."""
    return sum(_pages(n_fast * stride + PADDING) for stride in layer.strides) if n_fast else 0


def staging_bytes(layers: Sequence[ExpertLayer], n_fast: Sequence[int]) -> int:
    """Bytes of device memory that hold the other experts of any two layers, for large steps, and the rings of small ones;
    0 when there are none."""
    n_home = max((layer.n_expert - n for layer, n in zip(layers, n_fast)), default=0)
    return _shared_bytes(layers, n_home) + ring_bytes(layers) if n_home else 0


def ring_bytes(layers: Sequence[ExpertLayer]) -> int:
    """Bytes of device memory of the rings."""
    return _shared_bytes(layers, RING_SLOTS)


def _shared_bytes(layers: Sequence[ExpertLayer], n_slots: int) -> int:
    """Two sets of slots that all layers share in turn."""
    n_tensors = max(len(layer.strides) for layer in layers)
    sizes = [max(layer.strides[i] for layer in layers if i < len(layer.strides)) for i in range(n_tensors)]
    return 2 * sum(_pages(n_slots * stride + PADDING + PAGE) for stride in sizes)


def uniform_slots(layers: Sequence[ExpertLayer], budget: int) -> list[int]:
    """As many fast slots as fit `budget` bytes of device memory, about the same in every layer; maybe none."""

    def total(n: int) -> int:
        return sum(slot_bytes(layer, min(n, layer.n_expert)) for layer in layers)

    low, high = 0, max((layer.n_expert for layer in layers), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if total(middle) <= budget:
            low = middle
        else:
            high = middle - 1
    chosen = [min(low, layer.n_expert) for layer in layers]
    left = budget - total(low)
    while True:  # one more here and there: what is left of the budget, and of pages
        grown = False
        for i, layer in enumerate(layers):
            if chosen[i] < layer.n_expert:
                more = slot_bytes(layer, chosen[i] + 1) - slot_bytes(layer, chosen[i])
                if more <= left:
                    chosen[i] += 1
                    left -= more
                    grown = True
        if not grown:
            return chosen
