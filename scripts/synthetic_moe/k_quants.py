"""Q6_K of given values: gguf's Python part reads the K types but does not write them.

For the tensors that must mean something, the embedding and the output head, in the type of a Q4_K_M file.
"""

from __future__ import annotations

import numpy as np

BLOCK, GROUP = 256, 16  # values of a block, and of a group with one 8-bit scale


def quantize_q6_k(values: np.ndarray) -> np.ndarray:
    """uint8[n, row bytes] of float32[n, row length], a multiple of 256: value = d * scale * (code - 32)."""
    groups = values.reshape(-1, BLOCK // GROUP, GROUP)  # [n_block, 16, 16]
    largest = np.abs(groups).max(axis=2)
    d = (largest.max(axis=1, keepdims=True) / (31 * 127)).astype("<f2")  # [n_block, 1]
    step = np.maximum(d.astype(np.float32), 1e-12)
    scales = np.clip(np.ceil(largest / (31 * step)), 1, 127)  # rounded up: no value is cut
    codes = np.rint(groups / (scales * step)[:, :, None]).clip(-32, 31).astype(np.int8) + np.int8(32)
    # a block is two halves of four rows of 32 codes: low nibbles of rows 0 and 2, of 1 and 3, then the upper bits of all
    rows = codes.view(np.uint8).reshape(-1, 2, 4, 32)
    low = (rows[:, :, :2] & 15) | (rows[:, :, 2:] & 15) << 4  # [n_block, 2, 2, 32]
    high = rows >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(high, axis=2)  # [n_block, 2, 32]
    n = len(rows)
    parts = [low.reshape(n, -1), high.reshape(n, -1), scales.astype(np.int8).view(np.uint8), d.view(np.uint8)]
    return np.hstack(parts).reshape(len(values), -1)
