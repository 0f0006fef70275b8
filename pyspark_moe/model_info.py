"""What a GGUF model says about its experts: layers, sizes, how many a token uses. Reads headers only, never weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from .errors import ModelFileError
from .gguf_header import GgufHeader, Value, read_gguf_header

# llama.cpp ends the process, with a stack trace, for a model with more (LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS), instead of refusing it.
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024
_MAX_SHARDS = 99_999  # what a shard's name has room for

_EXPERT_WEIGHT = re.compile(r"blk\.([0-9]{1,9})\.ffn_(gate|up|down|gate_up)_exps\.weight")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def largest_int(value: Value | None, default: int) -> int:
    """A metadata value as an int, of an array its largest element; `default` where there is none, or none that is finite."""
    values = value if isinstance(value, tuple) else (value,)
    return max((int(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)), default=default)


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer. `strides`: bytes of one expert in each of its tensors."""

    layer: int
    n_expert: int
    strides: tuple[int, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert over all its tensors."""
        return sum(self.strides)

    @property
    def total_bytes(self) -> int:
        return self.n_expert * self.expert_bytes


@dataclass(frozen=True)
class ModelInfo:
    """A model over all its shards. `n_expert_used`: experts of one token in one layer, 0 for a dense model."""

    path: Path
    shards: tuple[Path, ...]
    architecture: str
    name: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_expert_used: int
    layers: tuple[ExpertLayer, ...]
    tensor_bytes: int
    file_bytes: int
    metadata: dict[str, Value] = field(repr=False, compare=False)

    @property
    def is_moe(self) -> bool:
        return bool(self.layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(layer.total_bytes for layer in self.layers)

    @property
    def other_bytes(self) -> int:
        """Bytes of all other weights."""
        return self.tensor_bytes - self.expert_bytes

    def get(self, key: str, default: Value | None = None) -> Value | None:
        """Metadata under the architecture's prefix, e.g. get("expert_count")."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def get_int(self, key: str, default: int = 0) -> int:
        """The same as an int; the largest element of a per-layer array. What is no number counts as not there."""
        return largest_int(self.get(key, default), default)


def _shard_paths(first: GgufHeader) -> list[Path]:
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [first.path]
    if count > _MAX_SHARDS:
        raise ModelFileError(f"'{first.path}' says that it is one of {count} parts; {_MAX_SHARDS} is the most. Download it again.")
    number = first.metadata.get("split.no", 0)
    match = _SHARD.fullmatch(first.path.name)
    if number != 0 or not match:
        raise ModelFileError(
            f"'{first.path}' is part {int(number) + 1 if isinstance(number, int) else number} of {count} of a split model: "
            f"give the first part, named …-00001-of-{count:05d}.gguf."
        )
    return [first.path.with_name(f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]


def _expert_layers(headers: list[GgufHeader]) -> tuple[ExpertLayer, ...]:
    found: dict[int, list[tuple[str, str, int, int]]] = {}
    for header in headers:
        for tensor in header.tensors:
            match = _EXPERT_WEIGHT.fullmatch(tensor.name)
            if not match:
                continue
            n_expert = tensor.shape[2] if len(tensor.shape) >= 3 else 0
            if n_expert < 1 or tensor.n_bytes % n_expert:
                raise ModelFileError(f"'{header.path}': tensor '{tensor.name}' of shape {tensor.shape} does not hold experts.")
            found.setdefault(int(match[1]), []).append((match[2], tensor.name, n_expert, tensor.n_bytes // n_expert))
    layers = []
    for layer, tensors in sorted(found.items()):
        counts = {n for _, _, n, _ in tensors}
        if len(counts) != 1:
            raise ModelFileError(f"'{headers[0].path}': the expert tensors of block {layer} hold different numbers of experts: {sorted(counts)}.")
        layers.append(ExpertLayer(layer, counts.pop(), tuple(stride for _, _, _, stride in tensors)))
    return tuple(layers)


def read_model_info(path: str | Path) -> ModelInfo:
    """Reads the headers of a model and of all its shards. Raises ModelNotFoundError, ModelFileError."""
    first = read_gguf_header(path)
    shards = _shard_paths(first)  # first: only the first part names the architecture
    architecture = first.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(f"'{path}' does not name its architecture (general.architecture): it is not a language model.")
    headers = [first] + [read_gguf_header(shard) for shard in shards[1:]]
    layers = _expert_layers(headers)
    embedding = next((t for h in headers for t in h.tensors if t.name == "token_embd.weight"), None)
    info = ModelInfo(
        path=first.path,
        shards=tuple(shards),
        architecture=architecture,
        name=str(first.metadata.get("general.name", first.path.name)),
        n_layer=0,
        n_embd=0,
        n_vocab=embedding.shape[1] if embedding and len(embedding.shape) > 1 else 0,
        n_ctx_train=0,
        n_expert_used=0,
        layers=layers,
        tensor_bytes=sum(t.n_bytes for h in headers for t in h.tensors),
        file_bytes=sum(h.file_bytes for h in headers),
        metadata=first.metadata,
    )
    n_layer = info.get_int("block_count")
    if info.get("block_count") is not None and not 1 <= n_layer <= _MAX_LAYERS:
        raise ModelFileError(f"'{path}' says that it has {n_layer} layers; 1 to {_MAX_LAYERS} can be. Download it again.")
    n_used = info.get_int("expert_used_count")
    n_expert = max((layer.n_expert for layer in layers), default=0)
    if layers and not 1 <= n_used <= n_expert:
        raise ModelFileError(f"'{path}' says that a token uses {n_used} of {n_expert} experts; that cannot be.")
    if layers and not n_used <= (n_declared := info.get_int("expert_count")) <= _MAX_EXPERTS:
        raise ModelFileError(f"'{path}' says that a layer has {n_declared} experts, of which a token uses {n_used}; {_MAX_EXPERTS} is the most. Download it again.")
    return replace(
        info,
        n_layer=n_layer,
        n_embd=info.get_int("embedding_length"),
        n_ctx_train=info.get_int("context_length"),
        n_expert_used=n_used if layers else 0,
    )
