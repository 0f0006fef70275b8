"""Draft detection and the checks of a pair, on headers written here and on the demo pair."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from pyspark_moe import draft
from pyspark_moe.errors import DraftError

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "pyspark_moe" / "data"
TARGET, DRAFT = DATA / "target-Q4_K_M.gguf", DATA / "draft-q8_0.gguf"
TOKENS = [f"t{i}" for i in range(64)]


def write(path: Path, arch: str, *, tensors: dict[str, tuple[int, ...]], tokens: list[str] | None = TOKENS, hidden: int = 32,
          blocks: int = 4, numbers: dict[str, int] | None = None, layers: list[int] | None = None, types: list[int] | None = None,
          strings: dict[str, str] | None = None) -> Path:
    """A GGUF with a header and zero tensors of the given shapes (ggml order)."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(blocks)
    writer.add_embedding_length(hidden)
    for key, value in (numbers or {}).items():
        writer.add_uint32(f"{arch}.{key}", value)
    for key, text in (strings or {}).items():
        writer.add_string(key, text)
    if layers is not None:
        writer.add_array(f"{arch}.target_layers", layers)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
    if types is not None:
        writer.add_token_types(types)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(tuple(reversed(shape)), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


MODEL = {"token_embd.weight": (32, 64), "blk.0.attn_norm.weight": (32,)}
FUSED = {"fc.weight": (96, 32)}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write(tmp_path / "target.gguf", "qwen3moe", tensors=MODEL)


def dflash(path: Path, **changes: object) -> Path:
    options: dict = {"tensors": FUSED, "layers": [0, 1, 3]} | changes
    return write(path, "dflash", **options)


def test_demo_pair_is_dspark() -> None:
    assert draft.resolve(DRAFT, TARGET) == ["--spec-type", "draft-dspark", "--spec-draft-model", str(DRAFT)]


def test_kinds(tmp_path: Path, target: Path) -> None:
    def kind(path: Path, of: Path = target) -> str:
        return draft.resolve(path, of)[1]

    assert kind(dflash(tmp_path / "a.gguf")) == "draft-dflash"
    assert kind(dflash(tmp_path / "b.gguf", tensors=FUSED | {"markov_w1.weight": (8, 64)})) == "draft-dspark"
    assert kind(write(tmp_path / "c.gguf", "eagle3", tensors=FUSED, layers=[0, 1, 3], numbers={"target_hidden_size": 32})) == "draft-eagle3"
    assert kind(write(tmp_path / "d.gguf", "llama", tensors={"token_embd.weight": (16, 64), "blk.0.attn_norm.weight": (16,)}, hidden=16)) == "draft-simple"
    whole = write(tmp_path / "e.gguf", "qwen35moe", tensors=MODEL, blocks=5)
    head = {"blk.4.nextn.eh_proj.weight": (64, 32)}
    assert kind(write(tmp_path / "f.gguf", "qwen35moe", tensors=head, blocks=5, numbers={"nextn_predict_layers": 1}), whole) == "draft-mtp"


def test_head_in_the_target_itself_needs_no_second_model(tmp_path: Path) -> None:
    both = write(tmp_path / "both.gguf", "qwen35moe", tensors=MODEL | {"blk.4.nextn.eh_proj.weight": (64, 32)}, blocks=5)
    assert draft.resolve(both, both) == ["--spec-type", "draft-mtp"]


def test_small_model_with_a_head_is_a_plain_draft_for_a_larger_one(tmp_path: Path, target: Path) -> None:
    small = {"token_embd.weight": (16, 64), "blk.0.attn_norm.weight": (16,), "blk.4.nextn.eh_proj.weight": (32, 16)}
    assert draft.resolve(write(tmp_path / "s.gguf", "qwen35", tensors=small, hidden=16, blocks=5), target)[1] == "draft-simple"


def test_unknown_target_checks_the_draft_alone(tmp_path: Path) -> None:
    assert draft.resolve(DRAFT, None)[1] == "draft-dspark"
    with pytest.raises(DraftError, match="no draft model"):
        draft.resolve(write(tmp_path / "x.gguf", "clip", tensors={"v.weight": (4,)}), None)


def refused(draft_path: Path, target_path: Path, *parts: str) -> None:
    with pytest.raises(DraftError) as caught:
        draft.resolve(draft_path, target_path)
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert text.endswith(".") and str(draft_path) in text


def test_hidden_size_mismatch(tmp_path: Path, target: Path) -> None:
    refused(dflash(tmp_path / "d.gguf", hidden=16, tensors={"fc.weight": (48, 16)}), target, "hidden size of 16", "has 32")


def test_draft_that_contradicts_itself(tmp_path: Path, target: Path) -> None:
    refused(dflash(tmp_path / "d.gguf", layers=[0, 1]), target, "contradicts itself", "96", "64")
    refused(dflash(tmp_path / "e.gguf", tensors={"x": (4,)}), target, "fc.weight")
    refused(dflash(tmp_path / "f.gguf", layers=None), target, "target_layers")


def test_architecture_that_exposes_nothing(tmp_path: Path) -> None:
    olmoe = write(tmp_path / "olmoe.gguf", "olmoe", tensors=MODEL)
    refused(dflash(tmp_path / "d.gguf"), olmoe, "'olmoe'", "layer inputs", "Serve without a draft")


def test_layers_outside_the_target(tmp_path: Path, target: Path) -> None:
    refused(dflash(tmp_path / "d.gguf", layers=[0, 1, 9]), target, "reads layer 9", "0 to 3")
    refused(dflash(tmp_path / "e.gguf", layers=[0, 1, -1]), target, "reads layer -1")
    refused(dflash(tmp_path / "f.gguf", layers=[0, 1, 4]), target, "output of the last layer")


def test_vocabulary_mismatch(tmp_path: Path, target: Path) -> None:
    refused(dflash(tmp_path / "size.gguf", tokens=TOKENS + ["more"]), target, "65 and 64 tokens")
    refused(dflash(tmp_path / "text.gguf", tokens=TOKENS[:9] + ["other"] + TOKENS[10:]), target, "token 9 is 'other' and 't9'")
    refused(dflash(tmp_path / "none.gguf", tokens=None), target, "no vocabulary")
    small = {"token_embd.weight": (16, 64), "blk.0.attn_norm.weight": (16,)}
    refused(write(tmp_path / "p.gguf", "llama", tensors=small, tokens=[f"u{i}" for i in range(64)]), target, "token 5 is 'u5' and 't5'")
    refused(write(tmp_path / "q.gguf", "llama", tensors=small, tokens=TOKENS + [f"pad{i}" for i in range(129)]), target, "193 and 64 tokens")


def test_padding_and_unused_tokens_are_no_mismatch(tmp_path: Path, target: Path) -> None:
    small = {"token_embd.weight": (16, 64), "blk.0.attn_norm.weight": (16,)}
    assert draft.resolve(write(tmp_path / "p.gguf", "llama", tensors=small, tokens=TOKENS + ["pad"] * 128), target)[1] == "draft-simple"
    renamed = TOKENS[:9] + ["[unused]"] + TOKENS[10:]
    assert draft.resolve(dflash(tmp_path / "d.gguf", tokens=renamed, types=[1] * 9 + [5] + [1] * 54), target)[1] == "draft-dflash"


def test_unreadable_files(tmp_path: Path, target: Path) -> None:
    refused(tmp_path / "absent.gguf", target, "cannot be read", "does not exist")
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"hello, this is no model")
    refused(noise, target, "cannot be read")
    whole = DRAFT.read_bytes()
    cut = tmp_path / "cut.gguf"
    for n in (0, 3, 8, 23, 24, 100, 5000, 100_000):
        cut.write_bytes(whole[:n])
        with pytest.raises(DraftError, match="cannot be read"):
            draft.resolve(cut, target)


def test_table_of_targets_matches_the_built_sources() -> None:
    source = ROOT / "build" / "native" / "upstream"
    if not (source / "src" / "llama-model.cpp").is_file():
        pytest.skip("needs the staged llama.cpp sources of a build (make build)")
    done = subprocess.run([sys.executable, ROOT / "scripts" / "draft_targets.py", "--source", source, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("size", [0, 4096, 2**32 - 1])
def test_blocks_that_llama_cpp_would_end_the_process_for_are_refused(size: int, target: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftError, match=f"blocks of {size} tokens; 1 to 128"):
        draft.resolve(dflash(tmp_path / "draft.gguf", numbers={"block_size": size}), target)
