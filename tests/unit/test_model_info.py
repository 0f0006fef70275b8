"""What is read from GGUF headers, and that a damaged file gives a sentence and nothing else."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pytest

from pyspark_moe.budget import Serving, kv_cache_bytes
from pyspark_moe.errors import ModelFileError, ModelNotFoundError
from pyspark_moe.gguf_header import read_gguf_header
from pyspark_moe.model_info import read_model_info

from gguf_files import DENSE_TENSORS, MOE_METADATA, MOE_TENSORS, f32, string_array, u16, u32, write_gguf


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "moe.gguf", MOE_METADATA, MOE_TENSORS)


def test_layers_and_sizes(moe: Path) -> None:
    info = read_model_info(moe)
    assert info.is_moe and info.n_expert_used == 2
    assert [(l.layer, l.n_expert, l.strides) for l in info.layers] == [
        (1, 4, (16 * 18, 16 * 18, 32 * 32 * 4)),
        (2, 4, (32 * 18, 32 * 18)),
    ]
    assert info.expert_bytes == 4 * (2 * 16 * 18 + 32 * 32 * 4) + 4 * 2 * 32 * 18
    assert info.other_bytes == 32 * 100 * 4 + 32 * 16 * 4 + 32 * 4 * 4  # with the expert biases, which stay in memory
    assert (info.n_layer, info.n_ctx_train, info.n_embd, info.n_vocab) == (3, 1024, 32, 100)


def test_dense_model(tmp_path: Path) -> None:
    info = read_model_info(write_gguf(tmp_path / "dense.gguf", MOE_METADATA, DENSE_TENSORS))
    assert not info.is_moe and info.n_expert_used == 0 and info.expert_bytes == 0


def test_a_layer_that_straddles_two_shards_is_one_layer(tmp_path: Path) -> None:
    split = {**MOE_METADATA, "split.count": u16(2), "split.no": u16(0)}
    second = {"split.count": u16(2), "split.no": u16(1)}
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", split, MOE_TENSORS[:3])
    write_gguf(tmp_path / "m-00002-of-00002.gguf", second, MOE_TENSORS[3:])
    whole = read_model_info(write_gguf(tmp_path / "whole.gguf", MOE_METADATA, MOE_TENSORS))
    info = read_model_info(first)
    assert info.layers == whole.layers and info.tensor_bytes == whole.tensor_bytes
    assert len(info.shards) == 2

    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match="m-00002-of-00002.gguf"):
        read_model_info(first)


def test_a_later_shard_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-00002-of-00002.gguf", {**MOE_METADATA, "split.count": u16(2), "split.no": u16(1)}, MOE_TENSORS)
    with pytest.raises(ModelFileError, match="part 2 of 2.*00001-of-00002"):
        read_model_info(path)


def test_every_cut_is_a_model_file_error(moe: Path, tmp_path: Path) -> None:
    data = moe.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 1200, 7), len(data) // 2, len(data) - 32]:
        cut.write_bytes(data[:size])
        with pytest.raises(ModelFileError):
            read_model_info(cut)


def test_flipped_header_bytes_never_escape(moe: Path, tmp_path: Path) -> None:
    """Any damage is either harmless or a ModelFileError; never another exception, never unbounded memory or time."""
    data = bytearray(moe.read_bytes())
    rng = random.Random(1)
    damaged = tmp_path / "damaged.gguf"
    n_refused = 0
    for _ in range(400):
        copy = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            copy[rng.randrange(2000)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        damaged.write_bytes(copy)
        try:
            read_model_info(damaged)
        except ModelFileError:
            n_refused += 1
    assert n_refused > 100


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({**MOE_METADATA, "testarch.expert_used_count": u32(9)}, MOE_TENSORS, "uses 9 of 4 experts"),
        ({**MOE_METADATA, "testarch.expert_used_count": f32(math.nan)}, MOE_TENSORS, "uses 0 of 4 experts"),
        ({**MOE_METADATA, "testarch.expert_count": u32(0)}, MOE_TENSORS, "has 0 experts, of which a token uses 2"),
        ({**MOE_METADATA, "testarch.expert_count": u32(2**32 - 1)}, MOE_TENSORS, "has 4294967295 experts"),
        ({**MOE_METADATA, "testarch.block_count": u32(0)}, DENSE_TENSORS, "has 0 layers"),
        ({**MOE_METADATA, "testarch.block_count": u32(3 + 2**31)}, MOE_TENSORS, "has 2147483651 layers"),  # one bit of the file
        (MOE_METADATA, [*MOE_TENSORS, ("blk.1.ffn_gate_up_exps.weight", (32, 16, 2), 0, 32 * 16 * 2 * 4)], "different numbers of experts"),
        (MOE_METADATA, [("blk.1.ffn_up_exps.weight", (32, 16), 0, 32 * 16 * 4)], "does not hold experts"),
        (MOE_METADATA, [("odd", (33, 2), 2, 64)], "not a multiple of its block"),
        ({"general.name": MOE_METADATA["general.name"]}, DENSE_TENSORS, "does not name its architecture"),
        ({**MOE_METADATA, "general.alignment": u32(3)}, DENSE_TENSORS, "alignment"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, metadata: dict, tensors: list, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_model_info(write_gguf(tmp_path / "bad.gguf", metadata, tensors))


def test_impossible_counts_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + b"\0" * 100)
    with pytest.raises(ModelFileError, match="more than the file can hold"):
        read_gguf_header(path)


def test_impossible_numbers_of_shards_and_layers_cost_nothing(tmp_path: Path) -> None:
    split = {**MOE_METADATA, "split.count": u32(2**31), "split.no": u16(0)}
    with pytest.raises(ModelFileError, match="one of 2147483648 parts"):
        read_model_info(write_gguf(tmp_path / "m-00001-of-00002.gguf", split, MOE_TENSORS))
    unheard = [(name.replace("blk.1.", f"blk.{'9' * 5000}."), *rest) for name, *rest in MOE_TENSORS]  # more digits than int() takes
    assert [layer.layer for layer in read_model_info(write_gguf(tmp_path / "m.gguf", MOE_METADATA, unheard)).layers] == [2]


@pytest.mark.parametrize("key", ["context_length", "embedding_length", "attention.head_count", "attention.head_count_kv", "full_attention_interval"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_sizes_that_are_no_numbers_are_as_if_they_were_not_there(key: str, value: float, tmp_path: Path) -> None:
    for is_list in (False, True):
        given = f32(value) if not is_list else struct.pack("<IIQff", 9, 6, 2, value, value)
        info = read_model_info(write_gguf(tmp_path / "m.gguf", {**MOE_METADATA, f"testarch.{key}": given}, MOE_TENSORS))
        assert kv_cache_bytes(info, Serving(n_ctx=512)) >= 0


def test_what_is_not_a_readable_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        read_model_info(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFoundError, match="is not a file"):
        read_model_info(tmp_path)
    (tmp_path / "text.gguf").write_text("hello, this is not a model at all")
    with pytest.raises(ModelFileError, match="GGUF mark"):
        read_model_info(tmp_path / "text.gguf")


def test_string_arrays_are_kept_on_request_only(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {**MOE_METADATA, "tokenizer.ggml.tokens": string_array(["x", "yz"])}, DENSE_TENSORS)
    assert "tokenizer.ggml.tokens" not in read_gguf_header(path).metadata
    assert read_gguf_header(path, frozenset(("tokenizer.ggml.tokens",))).metadata["tokenizer.ggml.tokens"] == (b"x", b"yz")
