"""Writes a synthetic model: the header by gguf's writer, the data by data.py. Memory stays below 2 GiB."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType

from .architectures import ARCHITECTURES, common_metadata
from .data import Place, write_data
from .routing import Topics, skew_for_share, topic_prompt
from .shape import Shape
from .tensors import Parts, TensorSpec

TOPIC_KEYS = "synthetic_moe"  # metadata of ours; llama.cpp reads over it


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
    if shape.n_vocab < shape.n_token:
        raise ValueError(f"a vocabulary of {shape.n_vocab} does not hold the {shape.n_token} tokens of the tokenizer")
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


def tokenizer_sizes(tokenizer: Path) -> dict[str, int]:
    """n_token and n_control of the tokenizer in a GGUF, as Shape has them; ValueError when there is none."""
    lists = {key: value for key, value, _ in _read_tokenizer(tokenizer)}
    if "tokenizer.ggml.tokens" not in lists:
        raise ValueError(f"'{tokenizer}' has no tokenizer")
    kinds = lists.get("tokenizer.ggml.token_type", [])
    n_control = next((i for i, kind in enumerate(kinds) if kind == TokenType.NORMAL), 0)
    return {"n_token": len(lists["tokenizer.ggml.tokens"]), "n_control": n_control}


# what a list gets for each padding token. llama.cpp turns unused tokens into no text at all, so sampling one does no harm
_PADDING: dict[str, Callable[[int], object]] = {
    "tokenizer.ggml.tokens": "<unused{}>".format,
    "tokenizer.ggml.token_type": lambda i: int(TokenType.UNUSED),
    "tokenizer.ggml.scores": lambda i: 0.0,
}


def _copy_tokenizer(writer: GGUFWriter, source: Path, shape: Shape) -> None:
    """Copies the tokenizer's metadata, padded to the vocabulary, and notes what prompts of a topic need to know."""
    for key, value, types in _read_tokenizer(source):
        if key in _PADDING:
            value = value + [_PADDING[key](i) for i in range(shape.n_vocab - shape.n_token)]
        writer.add_key_value(key, value, types[0], types[1] if len(types) > 1 else None)
    for key, number in (("topics", shape.n_topics), ("tokens", shape.n_token), ("first_token", shape.n_control)):
        writer.add_uint32(f"{TOPIC_KEYS}.{key}", number)


def model_prompt(model: Path, topic: int, n: int, seed: int = 0) -> list[int]:
    """n token ids of a topic of a synthetic model (its first shard). ValueError: another model, or no such topic."""
    fields = GGUFReader(model).fields
    try:
        n_topics, n_token, first = (int(fields[f"{TOPIC_KEYS}.{key}"].contents()) for key in ("topics", "tokens", "first_token"))
    except KeyError:
        raise ValueError(f"'{model}' is no model of this program: it does not say which tokens have which topic") from None
    return topic_prompt(topic, n, n_topics=n_topics, n_token=n_token, first=first, seed=seed)


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


def write_model(
    path: Path, shape: Shape, tokenizer: Path, *, seed: int = 0, split_max_tensors: int = 0, n_workers: int | None = None
) -> Written:
    """Writes a model to `path` (or its shards next to it). The same arguments give the same bytes.

    split_max_tensors: tensors of a shard, 0 for one file. n_workers: threads, None for one on each core; they change
    nothing. Raises ValueError for sizes that do not fit, OSError.
    """
    specs, skew = tensor_specs(shape, seed)
    if tokenizer_sizes(tokenizer)["n_token"] != shape.n_token:
        raise ValueError(f"the tokenizer of '{tokenizer}' does not have {shape.n_token} tokens")
    writer = GGUFWriter(path, shape.arch, split_max_tensors=split_max_tensors)
    _copy_tokenizer(writer, tokenizer, shape)
    _add_metadata(writer, shape, path.stem)
    _write(writer, path, specs, seed, n_workers)
    files = tuple(Path(f) for f in writer.format_shard_names(path)) if split_max_tensors else (path,)
    return Written(files[0], files, sum(f.stat().st_size for f in files), skew)


def _write(writer: GGUFWriter, path: Path, specs: list[TensorSpec], seed: int, n_workers: int | None = None) -> None:
    n_bytes, free = sum(spec.n_bytes for spec in specs), shutil.disk_usage(path.parent).free
    if n_bytes > free:
        raise OSError(f"{path.name} needs {n_bytes / 2**30:.1f} GiB, '{path.parent}' has {free / 2**30:.1f} GiB free")
    for spec in specs:
        rows = spec.ne[:0:-1] if len(spec.ne) > 1 else ()
        if spec.kind == T.F32:
            writer.add_tensor_info(spec.name, (*rows, spec.ne[0]), np.dtype(np.float32), spec.n_bytes, spec.kind)
        else:
            writer.add_tensor_info(spec.name, (*rows, spec.n_bytes // spec.n_rows), np.dtype(np.uint8), spec.n_bytes, spec.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    by_name = {spec.name: spec for spec in specs}
    places = []
    for file, tensors in zip(writer.fout, writer.tensors):
        offset = GGUFWriter.ggml_pad(file.tell(), writer.data_alignment)
        for name in tensors:
            places.append(Place(file.fileno(), offset, by_name[name]))
            offset += GGUFWriter.ggml_pad(by_name[name].n_bytes, writer.data_alignment)
        os.truncate(file.fileno(), offset)  # what lies between tensors reads as zeros
    write_data(places, seed, n_workers or os.cpu_count() or 1)
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
    _write(writer, path, list(_adapter_specs(model, rank)), seed)
    return path
