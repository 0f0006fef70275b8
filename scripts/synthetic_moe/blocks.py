"""Random weights in GGUF's storage types, made as blocks directly.

Quantising random floats would cost minutes and gigabytes for a benchmark model. A block of random codes with a chosen
scale is as valid, has the wanted spread, and is made at memory speed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T

BlockMaker = Callable[[np.random.Generator, int, float], np.ndarray]


def _f16_bytes(values: np.ndarray) -> np.ndarray:
    """uint8[n, 2]: values as little-endian half floats."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _codes(rng: np.random.Generator, n: int, width: int) -> np.ndarray:
    """uint8[n, width] of uniform bytes."""
    return np.frombuffer(rng.bytes(n * width), np.uint8).reshape(n, width)


def _scale(rng: np.random.Generator, n: int, mean: float) -> np.ndarray:
    """float[n] scales within 20 % of `mean`, so that no two blocks are alike."""
    return mean * rng.uniform(0.8, 1.2, n)


def _q8_0(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    # int8 codes are uniform: spread 73.9
    return np.hstack([_f16_bytes(_scale(rng, n, std / 73.9)), _codes(rng, n, 32)])


def _q4_0(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    # codes 0..15 minus 8: spread 4.61
    return np.hstack([_f16_bytes(_scale(rng, n, std / 4.61)), _codes(rng, n, 16)])


def _pack_k4_scales(scales: np.ndarray) -> np.ndarray:
    """uint8[n, 12] of Q4_K/Q5_K: eight 6-bit scales and eight equal 6-bit minima."""
    low, high = scales[:, :4], scales[:, 4:]
    head = low | ((high >> 4) << 6)
    return np.hstack([head, head, (high & 15) | ((high & 15) << 4)]).astype(np.uint8)


def _q4_k(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    # value = d * scale * code - dmin * minimum; minimum = scale and dmin = 7.5 d centre the codes 0..15 on zero
    d = _scale(rng, n, std / (4.61 * 47.5))
    scales = rng.integers(32, 64, (n, 8), dtype=np.uint8)
    return np.hstack([_f16_bytes(d), _f16_bytes(d * 7.5), _pack_k4_scales(scales), _codes(rng, n, 128)])


def _q5_k(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    # as Q4_K with codes 0..31: spread 9.23, centre 15.5
    d = _scale(rng, n, std / (9.23 * 47.5))
    scales = rng.integers(32, 64, (n, 8), dtype=np.uint8)
    return np.hstack([_f16_bytes(d), _f16_bytes(d * 15.5), _pack_k4_scales(scales), _codes(rng, n, 160)])


def _q6_k(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    # value = d * scale * (code - 32), codes 0..63: spread 18.5
    scales = rng.integers(64, 128, (n, 16), dtype=np.uint8)
    return np.hstack([_codes(rng, n, 192), scales, _f16_bytes(_scale(rng, n, std / (18.5 * 95.5)))])


def _mxfp4(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    # e2m1 codes have a spread of 2.93; the block scale is a power of two
    exponent = 127 + int(np.round(np.log2(std / 2.93)))
    if not 1 < exponent < 253:
        raise ValueError(f"a spread of {std} is outside what MXFP4 can hold")
    exponents = rng.integers(exponent - 1, exponent + 2, (n, 1)).astype(np.uint8)
    return np.hstack([exponents, _codes(rng, n, 16)])


def _f32(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    return (rng.standard_normal(n, dtype=np.float32) * np.float32(std)).view(np.uint8).reshape(n, 4)


def _f16(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    return _f16_bytes(rng.standard_normal(n, dtype=np.float32) * np.float32(std))


_MAKERS: dict[T, BlockMaker] = {
    T.F32: _f32, T.F16: _f16, T.Q8_0: _q8_0, T.Q4_0: _q4_0, T.Q4_K: _q4_k, T.Q5_K: _q5_k, T.Q6_K: _q6_k, T.MXFP4: _mxfp4,
}  # fmt: skip

TYPES: tuple[str, ...] = tuple(t.name for t in _MAKERS)


def type_by_name(name: str) -> T:
    """The storage type `name`; ValueError names those that can be made."""
    if name not in TYPES:
        raise ValueError(f"type {name} cannot be made; choose one of {', '.join(TYPES)}")
    return T[name]


def row_bytes(kind: T, n: int) -> int:
    """Bytes of a row of n values; ValueError when n is not a multiple of the type's block."""
    block, size = GGML_QUANT_SIZES[kind]
    if n % block:
        raise ValueError(f"rows of {n} values do not fit {kind.name}, which stores blocks of {block}")
    return n // block * size


def random_rows(rng: np.random.Generator, kind: T, n_rows: int, n: int, std: float) -> np.ndarray:
    """uint8[n_rows, row_bytes]: random weights of spread `std` (about; the exact law depends on the type)."""
    block, _ = GGML_QUANT_SIZES[kind]
    width = row_bytes(kind, n)
    return _MAKERS[kind](rng, n_rows * n // block, std).reshape(n_rows, width)
