"""How many fast slots each layer gets on a GPU, and what they cost there. Pure; native/stack_memory_cuda.cpp allocates alike.

Every expert tensor has its own range of device memory, in whole pages of 2 MiB, with padding that matrix kernels read.
Experts without a slot are read from pinned RAM; a large step has them copied into staging memory, two layers in turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np

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
    slots = [0] * len(layers)
    _grow(layers, slots, budget, lambda i: float(slots[i]))
    return slots


def greedy_slots(layers: Sequence[ExpertLayer], budget: int, floor: int, hotness: Mapping[int, np.ndarray]) -> list[int] | None:
    """Fast slots by uses per byte: the next slot goes where the next expert is used most for its size.

    hotness  layer number -> uses of each expert, float or int [n_expert]; a layer that is missing counts as unused.
    Every layer gets `floor` slots first. None when they do not fit `budget` bytes of device memory. Ties go to the layer
    with fewer slots, then to the earlier one, so the same input gives the same output.
    """
    slots = [min(floor, layer.n_expert) for layer in layers]
    left = budget - sum(slot_bytes(layer, n) for layer, n in zip(layers, slots))
    if left < 0:
        return None
    ranked = [np.sort(np.asarray(hotness.get(layer.layer, np.zeros(layer.n_expert)), dtype=float))[::-1] for layer in layers]
    _grow(layers, slots, left, lambda i: -float(ranked[i][slots[i]]) / layers[i].expert_bytes)
    return slots


def _grow(layers: Sequence[ExpertLayer], slots: list[int], left: int, rank: Callable[[int], float]) -> None:
    """Adds slots in place for `left` bytes, next where rank(i) of the layer with index i is least, until one does not fit.

    Slots that pages paid for already hold are taken at once. So slots are added in an order that does not depend on the
    budget, and a larger budget never takes a slot from any layer.
    """

    def fill(i: int) -> None:
        paid = slot_bytes(layers[i], slots[i])
        while slots[i] < layers[i].n_expert and slot_bytes(layers[i], slots[i] + 1) == paid:
            slots[i] += 1

    for i in range(len(layers)):
        fill(i)
    heap = [(rank(i), slots[i], i) for i, layer in enumerate(layers) if slots[i] < layer.n_expert]
    heapq.heapify(heap)
    while heap:
        _, _, i = heapq.heappop(heap)
        left -= slot_bytes(layers[i], slots[i] + 1) - slot_bytes(layers[i], slots[i])
        if left < 0:
            return
        slots[i] += 1
        fill(i)
        if slots[i] < layers[i].n_expert:
            heapq.heappush(heap, (rank(i), slots[i], i))
