"""Router weights of a model, and what they select."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, dequantize

from ..errors import ModelFileError
from ..gguf_header import TensorEntry, read_gguf_header
from ..model_info import ModelInfo

_SIGMOID = 2  # expert_gating_func


@dataclass(frozen=True)
class Router:
    """weight: float32 [n_expert, n_embd]; bias is added to the product, selection_bias to its activation; both [n_expert]."""

    weight: np.ndarray
    bias: np.ndarray
    selection_bias: np.ndarray
    is_sigmoid: bool

    @property
    def logit_bias(self) -> np.ndarray:
        """Both biases as one of the product, [n_expert]: a sigmoid rises by a quarter per unit where it is steepest. What
        softmax makes of a selection bias depends on the other experts and is left out."""
        return self.bias + 4 * self.selection_bias if self.is_sigmoid else self.bias

    def scores(self, hidden: np.ndarray) -> np.ndarray:
        """What the router ranks experts by, float32 [n_tokens, n_expert], for inputs [n_tokens, n_embd]."""
        logits = hidden.astype(np.float32) @ self.weight.T + self.bias
        if not self.selection_bias.any():
            return logits  # any activation keeps their order
        if self.is_sigmoid:
            return 1 / (1 + np.exp(-logits)) + self.selection_bias
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True) + self.selection_bias


def read_router(model: ModelInfo, layer: int) -> Router:
    """The router of block `layer`. Groups of experts, which some models choose from first, are not looked at.
    Raises ModelFileError when the file has none."""
    tensors = {t.name: (t, shard) for shard in model.shards for t in read_gguf_header(shard).tensors if t.name.startswith(f"blk.{layer}.")}
    name = f"blk.{layer}.ffn_gate_inp.weight"
    if name not in tensors:
        raise ModelFileError(f"'{model.path}' has no router in block {layer} ('{name}').")
    weight = _values(*tensors[name])
    if weight.ndim != 2:
        raise ModelFileError(f"'{model.path}': the router of block {layer} has the shape {weight.shape}.")
    nothing = np.zeros(len(weight), dtype=np.float32)

    def optional(suffix: str) -> np.ndarray:
        entry = tensors.get(f"blk.{layer}.{suffix}")
        return nothing if entry is None else _values(*entry)

    return Router(weight, optional("ffn_gate_inp.bias"), optional("exp_probs_b.bias"), model.get_int("expert_gating_func", 1) == _SIGMOID)


def _values(tensor: TensorEntry, path: Path) -> np.ndarray:
    """A tensor as float32, slowest dimension first."""
    with path.open("rb") as file:
        file.seek(tensor.offset)
        data = np.frombuffer(file.read(tensor.n_bytes), dtype=np.uint8)
    if len(data) != tensor.n_bytes:
        raise ModelFileError(f"'{path}' became shorter while it was read (tensor '{tensor.name[:64]}'). Download it again.")
    try:
        return dequantize(data, GGMLQuantizationType(tensor.type_id)).reshape(tuple(reversed(tensor.shape))).astype(np.float32)
    except (ValueError, NotImplementedError) as e:
        raise ModelFileError(f"'{path}': tensor '{tensor.name[:64]}' cannot be read: {e}.") from None
