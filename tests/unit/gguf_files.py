"""Writes small GGUF files for the tests of headers: by hand, since a damaged file is what no writer writes."""

from __future__ import annotations

import struct
from pathlib import Path

F32, Q4_0 = 0, 2
U16, U32, STRING, ARRAY = 2, 4, 8, 9


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def u32(value: int) -> bytes:
    return struct.pack("<II", U32, value)


def f32(value: float) -> bytes:
    return struct.pack("<If", 6, value)


def u16(value: int) -> bytes:
    return struct.pack("<IH", U16, value)


def string(value: str) -> bytes:
    return struct.pack("<I", STRING) + text(value)


def u32_array(values: list[int]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}I", ARRAY, U32, len(values), *values)


def string_array(values: list[str]) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(text, values))


MOE_METADATA = {
    "general.architecture": string("testarch"),
    "general.name": string("test model"),
    "tokenizer.ggml.tokens": string_array(["a"] * 100),
    "testarch.block_count": u32(3),
    "testarch.context_length": u32(1024),
    "testarch.embedding_length": u32(32),
    "testarch.attention.head_count": u32(4),
    "testarch.attention.head_count_kv": u32_array([2, 2, 0]),
    "testarch.attention.key_length": u32(8),
    "testarch.attention.value_length": u32(8),
    "testarch.expert_count": u32(4),
    "testarch.expert_used_count": u32(2),
}
# name, shape, type, bytes. The first block is dense, the second has separate gate and up, the third a fused one.
MOE_TENSORS = [
    ("token_embd.weight", (32, 100), F32, 32 * 100 * 4),
    ("blk.0.ffn_up.weight", (32, 16), F32, 32 * 16 * 4),
    ("blk.1.ffn_gate_exps.weight", (32, 16, 4), Q4_0, 16 * 4 * 18),
    ("blk.1.ffn_up_exps.weight", (32, 16, 4), Q4_0, 16 * 4 * 18),
    ("blk.1.ffn_down_exps.weight", (32, 32, 4), F32, 32 * 32 * 4 * 4),
    ("blk.2.ffn_gate_up_exps.weight", (32, 32, 4), Q4_0, 32 * 4 * 18),
    ("blk.2.ffn_gate_up_exps.bias", (32, 4), F32, 32 * 4 * 4),
    ("blk.2.ffn_down_exps.weight", (32, 32, 4), Q4_0, 32 * 4 * 18),
]
DENSE_TENSORS = MOE_TENSORS[:2]


def write_gguf(path: Path, metadata: dict[str, bytes], tensors: list[tuple[str, tuple[int, ...], int, int]], version: int = 3) -> Path:
    """Writes a GGUF whose weights are zeros."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value for key, value in metadata.items())
    offset = 0
    for name, shape, kind, n_bytes in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        offset += -(-n_bytes // 32) * 32
    head += b"\0" * (-len(head) % 32)
    path.write_bytes(head + b"\0" * offset)
    return path
