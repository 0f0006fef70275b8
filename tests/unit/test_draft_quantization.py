"""Quantising drafts: every tensor gets the type its scheme says, metadata stays, and what is not understood is refused."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from pyspark_moe.draft_quantization import choose_type, quantize_draft, quantize_q4_0, summary
from pyspark_moe.errors import DraftError

MATRICES = {"fc.weight": (32, 96), "markov_w1.weight": (50, 32), "markov_w2.weight": (50, 32), "blk.0.attn_q.weight": (64, 32), "blk.0.ffn_down.weight": (32, 64)}
VECTORS = {"output_norm.weight": 32, "enc.output_norm.weight": 32, "blk.0.attn_norm.weight": 32, "conf_proj.bias": 1}


def write_draft(path: Path, architecture: str = "dflash", dtype: type = np.float16, extra: dict[str, np.ndarray] | None = None, has_markov: bool = True) -> Path:
    random = np.random.default_rng(1)
    writer = GGUFWriter(path, architecture)
    writer.add_name("draft of the tests")
    writer.add_uint32("dflash.block_size", 8)
    writer.add_array("dflash.target_layers", [2, 5, 7])
    writer.add_bool("dflash.sample_from_anchor", True)
    writer.add_float32("dflash.rope.freq_base", 10000.0)
    writer.add_array("tokenizer.ggml.tokens", ["a", "\u00e9", "<|end|>"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 0.0])
    writer.add_file_type(1)
    for name, shape in MATRICES.items():
        if has_markov or "markov" not in name:
            writer.add_tensor(name, random.normal(size=shape).astype(dtype))
    for name, n in VECTORS.items():
        writer.add_tensor(name, random.normal(size=n).astype(np.float32))
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("scheme", "backbone", "file_type"), [("q8_0", "Q8_0", 7), ("q4-mix", "Q4_0", 2)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_types_metadata_and_values(tmp_path: Path, scheme: str, backbone: str, file_type: int, dtype: type) -> None:
    source, target = write_draft(tmp_path / "in.gguf", dtype=dtype), tmp_path / "out.gguf"
    report = quantize_draft(source, target, scheme)
    before, after = GGUFReader(source), GGUFReader(target)
    types = {t.name: t.tensor_type.name for t in after.tensors}
    assert types == {**{n: backbone if n.startswith("blk") else "Q8_0" for n in MATRICES}, **{n: "F32" for n in VECTORS}}
    assert [t.name for t in after.tensors] == [t.name for t in before.tensors] == [t.name for t in report]
    values = [{f.name: f.contents() for f in r.fields.values() if not f.name.startswith("GGUF.")} for r in (before, after)]
    assert values[1] == values[0] | {"general.file_type": file_type}
    kinds = [{f.name: f.types for f in r.fields.values() if not f.name.startswith("GGUF.")} for r in (before, after)]
    assert kinds[1] == kinds[0]
    for old, new in zip(before.tensors, after.tensors):
        assert list(old.shape) == list(new.shape)
        exact, close = dequantize(old.data, old.tensor_type), dequantize(new.data, new.tensor_type)
        assert np.abs(exact - close).max() <= {"F32": 0, "Q8_0": 0.03, "Q4_0": 0.4}[new.tensor_type.name]
    assert list(summary(report))[-1].endswith("%") and not list(tmp_path.glob("*.part"))


def test_a_draft_without_markov_head_is_quantised_too(tmp_path: Path) -> None:
    quantize_draft(write_draft(tmp_path / "in.gguf", has_markov=False), tmp_path / "out.gguf", "q4-mix")
    assert len(GGUFReader(tmp_path / "out.gguf").tensors) == len(MATRICES) - 2 + len(VECTORS)


def test_what_is_not_understood_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    odd = np.zeros((32, 32), np.float16)
    cases = {
        "architecture 'llama'": lambda p: write_draft(p, architecture="llama"),
        "tensor 'blk.0.ffn_gate_exps.weight' is not one": lambda p: write_draft(p, extra={"blk.0.ffn_gate_exps.weight": odd}),
        "not a GGUF file": lambda p: p.write_bytes(b"GGUX" + bytes(100)),
    }
    for i, (message, write) in enumerate(cases.items()):
        source = tmp_path / f"{i}.gguf"
        write(source)
        with pytest.raises(DraftError, match=message):
            quantize_draft(source, tmp_path / "out.gguf", "q8_0")
    with pytest.raises(DraftError, match="does not exist"):
        quantize_draft(tmp_path / "absent.gguf", tmp_path / "out.gguf", "q8_0")
    with pytest.raises(DraftError, match="use one of q8_0, q4-mix"):
        quantize_draft(write_draft(tmp_path / "good.gguf"), tmp_path / "out.gguf", "q2")
    assert not (tmp_path / "out.gguf").exists() and not list(tmp_path.glob("*.part"))


def test_quantising_twice_or_over_a_file_is_refused(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "in.gguf")
    quantize_draft(source, tmp_path / "once.gguf", "q8_0")
    with pytest.raises(DraftError, match="quantising twice"):
        quantize_draft(tmp_path / "once.gguf", tmp_path / "twice.gguf", "q4-mix")
    for target in ("once.gguf", "in.gguf"):
        before = (tmp_path / target).read_bytes()
        with pytest.raises(DraftError, match="exists: remove it"):
            quantize_draft(source, tmp_path / target, "q8_0")
        assert (tmp_path / target).read_bytes() == before


def test_scales_of_q4_0_are_chosen_by_error() -> None:
    values = np.random.default_rng(2).normal(size=(40, 128)).astype(np.float32)
    values[3] = 0
    ours = quantize_q4_0(values)
    reference = quantize(values, GGMLQuantizationType.Q4_0)
    assert ours.shape == reference.shape and ours.dtype == reference.dtype
    errors = [np.square(dequantize(q, GGMLQuantizationType.Q4_0) - values).reshape(-1, 32).sum(axis=1) for q in (ours, reference)]
    assert (errors[0] <= errors[1] * 1.0001 + 1e-12).all() and errors[0].sum() < 0.9 * errors[1].sum()
    assert not errors[0].reshape(40, -1)[3].any()


def test_rows_that_are_no_whole_blocks_and_vectors_stay() -> None:
    assert choose_type("conf_proj.weight", "F16", (320,), "q4-mix") == "F16"
    assert choose_type("conf_proj.weight", "F16", (320, 1), "q4-mix") == "F16"
    assert choose_type("fc.weight", "F16", (100, 64), "q8_0") == "F16"
    assert choose_type("blk.31.attn_conv_base", "F32", (64, 4, 2), "q4-mix") == "F32"
    assert GGMLQuantizationType.Q4_0.name == choose_type("blk.31.ffn_up.weight", "BF16", (64, 8), "q4-mix")
