"""Quantises draft models: which type each tensor gets, and the rewriting of the file.

Only drafts that llama.cpp calls `dflash` (DFlash and DSpark), whose tensors are listed here: a tensor that is not known is
refused, since whether its op takes a quantised weight is not known either.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DraftError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFReader, GGUFWriter, ReaderTensor

SCHEMES = ("q8_0", "q4-mix")
ARCHITECTURE = "dflash"
_FILE_TYPES = {"q8_0": 7, "q4-mix": 2}  # general.file_type: what most weights are (llama.h, LLAMA_FTYPE_MOSTLY_*)
_SOURCES = ("F32", "F16", "BF16")
_BLOCK = 32  # elements of Q8_0 and Q4_0
_SCALE_FACTORS = tuple(0.70 + 0.02 * i for i in range(26))  # of the scale that makes the largest value exact

# Products of the layers: what most of the file is, and what bears four bits.
_BACKBONE = re.compile(r"blk\.\d+\.(attn_q|attn_k|attn_v|attn_output|ffn_gate|ffn_down|ffn_up|attn_conv_proj|ffn_conv_proj)\.weight")
# What turns hidden states into tokens or reads those of the target; small, and an error here costs acceptance at once.
_HEADS = re.compile(r"(fc|markov_w[12]|conf_proj|selector_predecessor|selector_successor|selector_hidden|token_embd|output)\.weight")
# Norms, biases, scales, tables: kept as they are.
_KEPT = re.compile(
    r"(output_norm|enc\.output_norm)\.weight|(fc|markov_w2|output)\.scale|conf_proj\.bias|rope_freqs\.weight|d2t"
    r"|blk\.\d+\.((attn_norm|attn_q_norm|attn_k_norm|post_attention_norm|ffn_norm|post_ffw_norm|layer_output_scale|rope_freqs)\.weight"
    r"|attn_sinks\.weight|(attn_q|attn_k|attn_v|attn_output|ffn_gate|ffn_down|ffn_up)\.(bias|scale)|attn_conv_base|ffn_conv_base)"
)


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor of the result. from_type, to_type: ggml's names; equal when it is copied."""

    name: str
    from_type: str
    to_type: str
    from_bytes: int
    to_bytes: int


def choose_type(name: str, from_type: str, shape: tuple[int, ...], scheme: str) -> str:
    """The type of one tensor. shape: ne[0] first. Raises DraftError for a tensor that is not known, or quantised already."""
    if _KEPT.fullmatch(name):
        return from_type
    is_backbone = _BACKBONE.fullmatch(name) is not None
    if not is_backbone and not _HEADS.fullmatch(name):
        raise DraftError(f"tensor '{name}' is not one of a DFlash or DSpark draft that this program knows, so its type cannot be chosen. Quantise this draft with llama-quantize.")
    if from_type not in _SOURCES:
        raise DraftError(f"tensor '{name}' is {from_type} already; quantising twice loses quality. Give the draft in F16, BF16 or F32.")
    if len([n for n in shape if n > 1]) < 2 or shape[0] % _BLOCK != 0:
        return from_type  # a vector, or rows that are no whole blocks
    return "Q4_0" if is_backbone and scheme == "q4-mix" else "Q8_0"


def quantize_draft(source: str | Path, target: str | Path, scheme: str) -> list[QuantizedTensor]:
    """Writes `source` with other tensor types to `target`, which must not exist; it appears when it is complete.

    scheme: one of SCHEMES. "q8_0": every product in Q8_0. "q4-mix": products of the layers in Q4_0, heads and projections in Q8_0.
    Every metadata value is kept but general.file_type. Raises DraftError, OSError.
    """
    from gguf import GGUFReader

    if scheme not in SCHEMES:
        raise DraftError(f"the scheme is {scheme!r}: use one of {', '.join(SCHEMES)}.")
    target = Path(target)
    if target.exists():
        raise DraftError(f"'{target}' exists: remove it, or give another name.")
    try:
        reader = GGUFReader(source)
    except FileNotFoundError as e:
        raise DraftError(f"'{source}' does not exist.") from e
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as e:
        raise DraftError(f"'{source}' is not a GGUF file that can be read: {e}") from e
    architecture = _architecture(reader, source)
    types = [choose_type(t.name, t.tensor_type.name, tuple(int(n) for n in t.shape), scheme) for t in reader.tensors]

    part = target.with_name(target.name + ".part")
    try:
        result = _write(reader, part, architecture, types, scheme)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return result


def _architecture(reader: GGUFReader, source: str | Path) -> str:
    field = reader.get_field("general.architecture")
    name = str(field.contents()) if field else "none"
    if name != ARCHITECTURE:
        raise DraftError(f"'{source}' has architecture '{name}', and only DFlash and DSpark drafts ('{ARCHITECTURE}') are understood. Quantise other models with llama-quantize.")
    if reader.get_field("split.count") is not None:
        raise DraftError(f"'{source}' is a part of a split model: join it first with llama-gguf-split --merge.")
    return name


def _write(reader: GGUFReader, path: Path, architecture: str, types: list[str], scheme: str) -> list[QuantizedTensor]:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    writer = GGUFWriter(path, architecture)
    try:
        _copy_metadata(reader, writer, _FILE_TYPES[scheme])
        result = []
        for tensor, kind in zip(reader.tensors, types):
            to_type = GGMLQuantizationType[kind]
            if to_type == tensor.tensor_type:
                data = tensor.data
            else:
                values = dequantize(tensor.data, tensor.tensor_type)
                data = quantize_q4_0(values) if kind == "Q4_0" else quantize(values, to_type)
            writer.add_tensor(tensor.name, data, raw_dtype=to_type)
            result.append(QuantizedTensor(tensor.name, tensor.tensor_type.name, kind, int(tensor.n_bytes), int(data.nbytes)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return result


def quantize_q4_0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """float32 [..., n] to Q4_0 [..., n / 32 * 18]: 32 values share an F16 scale and have 4 bits each, value = scale * (bits - 8).

    gguf's own quantiser takes the scale from the largest value; here scales around that one are tried for each block, and the
    one with the least squared error is kept, since a draft loses acceptance with it.
    """
    import numpy as np

    blocks = np.asarray(values, np.float32).reshape(-1, _BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    best_bits = np.full(blocks.shape, 8, np.uint8)
    best_scale = np.zeros((len(blocks), 1), np.float16)
    best_error = np.square(blocks).sum(axis=1, keepdims=True)
    for factor in _SCALE_FACTORS:
        scale = (largest / -8 * factor).astype(np.float16)
        step = scale.astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            bits = np.where(step != 0, np.clip(np.rint(blocks / step) + 8, 0, 15), 8).astype(np.uint8)
        error = np.square(step * (bits.astype(np.float32) - 8) - blocks).sum(axis=1, keepdims=True)
        is_better = error < best_error
        best_bits, best_scale, best_error = (np.where(is_better, new, old) for new, old in ((bits, best_bits), (scale, best_scale), (error, best_error)))
    half = _BLOCK // 2
    packed = best_bits[:, :half] | best_bits[:, half:] << 4
    return np.concatenate([best_scale.view(np.uint8), packed], axis=1).reshape(*values.shape[:-1], -1)


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter, file_type: int) -> None:
    from gguf import GGUFValueType

    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue  # the writer's own
        if field.name == "general.file_type":
            writer.add_file_type(file_type)
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, sub_type=field.types[-1] if kind == GGUFValueType.ARRAY else None)
    if reader.get_field("general.file_type") is None:
        writer.add_file_type(file_type)


def summary(tensors: list[QuantizedTensor]) -> Iterator[str]:
    """Lines for the person: how many tensors of each type became what, and the size."""
    groups: dict[tuple[str, str], list[QuantizedTensor]] = {}
    for t in tensors:
        groups.setdefault((t.from_type, t.to_type), []).append(t)
    for (before, after), group in groups.items():
        size = sum(t.from_bytes for t in group), sum(t.to_bytes for t in group)
        yield f"{len(group):4d} tensors {before} -> {after}: {size[0]:,} -> {size[1]:,} bytes" if before != after else f"{len(group):4d} tensors {before} kept: {size[0]:,} bytes"
    before, after = sum(t.from_bytes for t in tensors), sum(t.to_bytes for t in tensors)
    yield f"{before:,} -> {after:,} bytes of weights, {100 * after / before:.0f} %"
