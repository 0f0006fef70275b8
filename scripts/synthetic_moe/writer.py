"""Writes a synthetic model tensor by tensor: memory stays at the size of one tensor."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from .architectures import ARCHITECTURES, common_metadata
from .routing import Topics, skew_for_share
from .shape import Shape
from .tensors import Parts, TensorSpec


@dataclass(frozen=True)
class Written:
    """What was made: the file to load (the first shard), all files, their bytes, and the router's skew."""

    path: Path
    files: tuple[Path, ...]
    n_bytes: int
    skew: float


def tensor_specs(shape: Shape, seed: int) -> tuple[list[TensorSpec], float]:
    """All tensors in file order, and the skew of the routers. ValueError: an unknown architecture, or sizes that do
    not fit the types."""
    if shape.arch not in ARCHITECTURES:
        raise ValueError(f"architecture {shape.arch} cannot be made; choose one of {', '.join(ARCHITECTURES)}")
    if shape.n_expert and not 1 <= shape.n_used <= shape.n_expert:
        raise ValueError(f"{shape.n_used} experts of {shape.n_expert} cannot be selected for a token")
    skew = shape.skew
    if skew is None:
        skew = 0.0
        if shape.n_expert:
            skew = skew_for_share(shape.hot_share, shape.n_embd, shape.n_expert, shape.n_used, shape.n_topics, shape.affinity)
    parts = Parts(shape, Topics.make(np.random.default_rng(seed), shape.n_embd, shape.n_topics), skew)
    specs = list(parts.embedding())
    for index in range(shape.n_layer + shape.n_mtp):
        specs += ARCHITECTURES[shape.arch].layer(parts, index, f"blk.{index}.")
    specs += parts.head()
    for spec in specs:
        _ = spec.n_bytes  # fails here, before a file exists, when a size does not fit its type
    return specs, skew


@lru_cache(maxsize=2)  # a vocabulary takes seconds to decode, and tests write many models
def _read_tokenizer(source: Path) -> tuple[tuple[str, object, list[GGUFValueType]], ...]:
    fields = GGUFReader(source).fields.items()
    return tuple((key, field.contents(), field.types) for key, field in fields if key.startswith("tokenizer."))


def _copy_tokenizer(writer: GGUFWriter, source: Path) -> int:
    """Copies the tokenizer's metadata; returns the number of tokens."""
    n_tokens = 0
    for key, value, types in _read_tokenizer(source):
        if key == "tokenizer.ggml.tokens":
            n_tokens = len(value)
        writer.add_key_value(key, value, types[0], types[1] if len(types) > 1 else None)
    if n_tokens == 0:
        raise ValueError(f"'{source}' has no tokenizer")
    return n_tokens


def _add_metadata(writer: GGUFWriter, shape: Shape, name: str) -> None:
    writer.add_name(name)
    for key, value in (common_metadata(shape) | ARCHITECTURES[shape.arch].metadata(shape)).items():
        key = f"{shape.arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def write_model(path: Path, shape: Shape, tokenizer: Path, *, seed: int = 0, split_max_tensors: int = 0) -> Written:
    """Writes a model to `path` (or its shards next to it). The same arguments give the same bytes.

    split_max_tensors: tensors of a shard, 0 for one file. Raises ValueError for sizes that do not fit, OSError.
    """
    specs, skew = tensor_specs(shape, seed)
    writer = GGUFWriter(path, shape.arch, split_max_tensors=split_max_tensors)
    if _copy_tokenizer(writer, tokenizer) != shape.n_vocab:
        raise ValueError(f"the tokenizer of '{tokenizer}' does not have {shape.n_vocab} tokens")
    _add_metadata(writer, shape, path.stem)
    _write(writer, specs, seed)
    files = tuple(Path(f) for f in writer.format_shard_names(path)) if split_max_tensors else (path,)
    return Written(files[0], files, sum(f.stat().st_size for f in files), skew)


def _write(writer: GGUFWriter, specs: list[TensorSpec], seed: int) -> None:
    for spec in specs:
        rows = spec.ne[:0:-1] if len(spec.ne) > 1 else ()
        if spec.kind == T.F32:
            writer.add_tensor_info(spec.name, (*rows, spec.ne[0]), np.dtype(np.float32), spec.n_bytes, spec.kind)
        else:
            writer.add_tensor_info(spec.name, (*rows, spec.n_bytes // spec.n_rows), np.dtype(np.uint8), spec.n_bytes, spec.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for spec in specs:
        # each tensor has its own stream: the data of one does not depend on the others
        rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(spec.name.encode())]))
        writer.write_tensor_data(spec.make(rng))
    writer.close()


def _adapter_specs(model: Path, rank: int) -> Iterator[TensorSpec]:
    for tensor in GGUFReader(model).tensors:
        ne = tuple(int(n) for n in tensor.shape)
        is_expert = tensor.name.endswith("_exps.weight")
        if is_expert or tensor.name.endswith(("attn_q.weight", "ffn_up_shexp.weight")):
            more = ne[2:]
            yield TensorSpec(f"{tensor.name}.lora_a", (ne[0], rank, *more), T.F32, ne[0] ** -0.5)
            yield TensorSpec(f"{tensor.name}.lora_b", (rank, ne[1], *more), T.F32, 0.5 * rank**-0.5)


def write_adapter(path: Path, model: Path, *, rank: int = 4, alpha: float = 8.0, seed: int = 0) -> Path:
    """Writes a random LoRA adapter for the experts (and some other matrices) of `model`, one file."""
    arch = GGUFReader(model).fields["general.architecture"].contents()
    writer = GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    _write(writer, list(_adapter_specs(model, rank)), seed)
    return path
