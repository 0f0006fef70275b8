"""Writes the data of tensors into files whose size is known, from several threads.

A model of 20 GiB cannot be made value by value. A large tensor is cut from a tile, 64 MiB of random blocks of its type
and spread, at a random place for every piece: the cost is that of copying to the page cache, and no two experts of a
tensor are alike. What is written depends on the seed and the tensor's name only, not on the threads or their order.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

from .blocks import random_rows
from .tensors import N_PADDING, TensorSpec

TILE_BYTES = 64 << 20
PIECE_BYTES = 4 << 20  # of a tile: smaller tensors are made whole, experts that are larger are several pieces

Tiles = dict[tuple[T, float], np.ndarray]


@dataclass(frozen=True)
class Place:
    """Where a tensor's data begins: an open file and the byte in it."""

    fd: int
    offset: int
    spec: TensorSpec


def is_tiled(spec: TensorSpec) -> bool:
    return isinstance(spec.fill, float) and spec.n_bytes >= PIECE_BYTES


def make_tile(seed: int, kind: T, std: float) -> np.ndarray:
    """uint8[n_block, block bytes], TILE_BYTES of them."""
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.Generator(np.random.SFC64([seed, int(kind), zlib.crc32(repr(std).encode())]))
    return random_rows(rng, kind, TILE_BYTES // size, block, std)


def tiled_pieces(spec: TensorSpec, rng: np.random.Generator, tile: np.ndarray) -> Iterator[np.ndarray]:
    """The tensor in order, in pieces of one expert at most; no two begin at the same place of the tile."""
    most = PIECE_BYTES // tile.shape[1]
    n_expert = spec.ne[2] if len(spec.ne) > 2 else 1
    n_block = spec.n_bytes // tile.shape[1] // n_expert
    lengths = [min(most, n_block - i) for i in range(0, n_block, most)] * n_expert
    starts = rng.choice(len(tile) - most, len(lengths), replace=len(lengths) > len(tile) - most)
    for start, length in zip(starts, lengths):
        yield tile[start : start + length]


def pieces(spec: TensorSpec, seed: int, tiles: Tiles) -> Iterator[np.ndarray]:
    """The tensor's data in order. Each tensor has its own stream: the data of one does not depend on the others."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(spec.name.encode())]))
    if is_tiled(spec):
        yield from tiled_pieces(spec, rng, tiles[spec.kind, spec.fill])
        return
    made = spec.make(rng)
    yield made
    left = spec.n_rows - len(made)
    while left > 0:
        repeated = made[-N_PADDING:][:left]
        yield repeated
        left -= len(repeated)


def write_place(place: Place, seed: int, tiles: Tiles) -> None:
    offset = place.offset
    for piece in pieces(place.spec, seed, tiles):
        view = memoryview(np.ascontiguousarray(piece)).cast("B")
        while view:
            n = os.pwrite(place.fd, view, offset)
            view, offset = view[n:], offset + n


def write_data(places: Sequence[Place], seed: int, n_workers: int) -> None:
    """Writes all tensors; OSError of the first that fails, others may be written then."""
    keys = sorted({(p.spec.kind, p.spec.fill) for p in places if is_tiled(p.spec)})
    # those that are computed first: they take longest, and no one waits for them at the end
    ordered = sorted(places, key=lambda p: (is_tiled(p.spec), -p.spec.n_bytes))
    with ThreadPoolExecutor(n_workers) as threads:
        tiles = dict(zip(keys, threads.map(lambda key: make_tile(seed, *key), keys)))
        for done in [threads.submit(write_place, place, seed, tiles) for place in ordered]:
            done.result()
