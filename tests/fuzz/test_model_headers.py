"""Damaged model headers: Python and C++ each say what is wrong, and where both accept a file they see the same experts.

The budget is computed in Python and the memory is taken in C++, so a file that the two read differently would break a
promise. Damage is aimed at the header: bytes, bits, 8-byte fields (counts, lengths, sizes, offsets), and the end.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark_moe import errors
from pyspark_moe.store import Store
from pyspark_moe.model_info import ModelInfo, read_model_info

N_EXPERT, N_FF, N_EMBD = 4, 64, 32
LIMITS = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
Damage = list[tuple[float, str, int]]


def write_base(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(2)
    writer.add_embedding_length(N_EMBD)
    writer.add_context_length(128)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(2)
    writer.add_array("qwen3moe.attention.head_count", [1, 2])
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    for block in range(2):
        writer.add_tensor(f"blk.{block}.attn_norm.weight", np.ones(N_EMBD, np.float32))
        for kind, shape in (("gate", (N_FF, N_EMBD)), ("up", (N_FF, N_EMBD)), ("down", (N_EMBD, N_FF))):
            data = gguf.quants.quantize(np.ones((N_EXPERT, *shape), np.float32), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"blk.{block}.ffn_{kind}_exps.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "base.gguf"
    write_base(path)
    return path.read_bytes()


@cache
def header_size(data: bytes) -> int:
    """Bytes before the first tensor's data: everything after that is weights."""
    return data.rindex(b"ffn_down_exps.weight") + 80


def apply(data: bytes, damage: Damage) -> bytes:
    """The damaged file. Positions are fractions of the header."""
    out = bytearray(data)
    for where, kind, value in damage:
        at = int(where * header_size(data))
        if kind == "byte":
            out[at] = value & 0xFF
        elif kind == "bit":
            out[at] ^= 1 << (value & 7)
        elif kind == "field":
            out[at : at + 8] = (value & (2**64 - 1)).to_bytes(8, "little")
        elif kind == "cut":
            del out[at:]
            break
        elif kind == "cut data":
            del out[len(out) - 1 - value % 4096 :]
            break
        else:
            out[at:at] = bytes([value & 0xFF]) * (1 + value % 9)
    return bytes(out)


values = st.one_of(st.integers(0, 300), st.integers(2**31 - 2, 2**32 + 2), st.integers(2**62, 2**64 - 1))
kinds = st.sampled_from(["byte", "bit", "field", "field", "cut", "cut data", "insert"])
damages = st.lists(st.tuples(st.floats(0, 0.999), kinds, values), min_size=1, max_size=3)


def read_python(path: Path) -> ModelInfo | None:
    try:
        return read_model_info(path)
    except errors.SparkError as e:
        assert str(e), "an error without a sentence"
        return None


def layers_native(path: Path) -> list[tuple[int, int, int]] | None:
    try:
        with Store(path, io_threads=1, lock_fast=False) as store:
            return [(layer.layer, layer.n_expert, layer.expert_bytes) for layer in store.layers]
    except errors.NoExpertsError:
        return []
    except errors.SparkError as e:
        assert str(e), "an error without a sentence"
        return None


def test_the_undamaged_file_is_read_alike(base: bytes, tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(base)
    info = read_python(path)
    assert info is not None and info.n_expert_used == 2
    expected = [(0, N_EXPERT, 3 * N_FF * 34), (1, N_EXPERT, 3 * N_FF * 34)]
    assert layers_native(path) == expected == [(layer.layer, layer.n_expert, layer.expert_bytes) for layer in info.layers]


@LIMITS
@given(damage=damages)
def test_damaged_headers(damage: Damage, base: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(apply(base, damage))
    info, native = read_python(path), layers_native(path)
    if info is not None and native is not None:
        assert native == [(layer.layer, layer.n_expert, layer.expert_bytes) for layer in info.layers]


@LIMITS
@given(data=st.binary(max_size=400))
def test_any_bytes(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    for start in (b"", b"GGUF", b"GGUF\x03\0\0\0"):
        path.write_bytes(start + data)
        read_python(path)
        assert not layers_native(path)


@pytest.mark.parametrize("field", ["shape", "expert_used_count", "split.count"])
@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_numbers_at_the_edges(field: str, value: int, base: bytes, tmp_path: Path) -> None:
    """Sizes that overflow when they are multiplied, counts that would be allocated."""
    path = tmp_path / "edge.gguf"
    data = bytearray(base)
    if field == "shape":
        at = base.index(b"blk.1.ffn_up_exps.weight") + len("blk.1.ffn_up_exps.weight") + 4
        data[at : at + 8] = value.to_bytes(8, "little")
    elif field == "expert_used_count":
        at = base.index(b"expert_used_count") + len("expert_used_count") + 4
        data[at : at + 4] = (value & (2**32 - 1)).to_bytes(4, "little")
    else:  # one more metadata entry, put first
        entry = len("split.count").to_bytes(8, "little") + b"split.count" + (2).to_bytes(4, "little") + (value & 0xFFFF).to_bytes(2, "little")
        data[16:24] = (int.from_bytes(base[16:24], "little") + 1).to_bytes(8, "little")
        data[24:24] = entry
    path.write_bytes(bytes(data))
    read_python(path)
    layers_native(path)
