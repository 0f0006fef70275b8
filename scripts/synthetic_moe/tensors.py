"""What one tensor of a synthetic model is, and the parts that architectures share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import quants

from .blocks import random_rows, row_bytes, type_by_name
from .k_quants import quantize_q6_k
from .routing import Topics, embeddings, output_head, router
from .shape import Shape

Fill = float | Callable[[np.random.Generator], np.ndarray]


N_PADDING = 1024  # rows of padding tokens that are made; the others repeat them


@dataclass(frozen=True)
class TensorSpec:
    """ne: sizes in ggml's order, the row length first. fill: a spread, or what makes the values (float32, rows last).
    n_made: rows that `fill` makes; those after them repeat its last N_PADDING. None: all are made."""

    name: str
    ne: tuple[int, ...]
    kind: T
    fill: Fill
    n_made: int | None = None

    @property
    def n_rows(self) -> int:
        return int(np.prod(self.ne[1:], dtype=np.int64))

    @property
    def n_bytes(self) -> int:
        return self.n_rows * row_bytes(self.kind, self.ne[0])

    def make(self, rng: np.random.Generator) -> np.ndarray:
        """uint8[n_made, row bytes]: these rows as they stand in the file."""
        if callable(self.fill):
            values = np.ascontiguousarray(self.fill(rng), np.float32).reshape(self.n_made or self.n_rows, self.ne[0])
            data = quantize_q6_k(values) if self.kind == T.Q6_K else quants.quantize(values, self.kind)
            return np.ascontiguousarray(data).view(np.uint8).reshape(len(values), -1)
        return random_rows(rng, self.kind, self.n_rows, self.ne[0], self.fill)


class Parts:
    """Makes the tensors that most architectures have, in llama.cpp's names."""

    def __init__(self, shape: Shape, topics: Topics, skew: float) -> None:
        self.shape = shape
        self.topics = topics
        self.skew = skew
        self.dense = type_by_name(shape.dense_type)
        self.expert = type_by_name(shape.expert_type) if shape.n_expert else self.dense
        self.down = type_by_name(shape.down_type) if shape.n_expert else self.dense
        self.down_rest = type_by_name(shape.down_rest_type) if shape.down_rest_type else self.down
        self.vocab = type_by_name(shape.vocab_type)

    def ones(self, name: str, n: int) -> TensorSpec:
        return TensorSpec(name, (n,), T.F32, lambda rng: np.ones(n, np.float32))

    def values(self, name: str, ne: tuple[int, ...], std: float, mean: float = 0.0) -> TensorSpec:
        n = int(np.prod(ne))
        return TensorSpec(name, ne, T.F32, lambda rng: rng.normal(mean, std, n))

    def matrix(self, name: str, n_in: int, n_out: int, gain: float = 1.0, *more: int) -> TensorSpec:
        return TensorSpec(name, (n_in, n_out, *more), self.dense, gain / n_in**0.5)

    def vocabulary(self, name: str, make: Callable[[np.random.Generator, int], np.ndarray]) -> TensorSpec:
        """make: of a number of padding rows, the rows of all tokens and after them the padding."""
        s = self.shape
        n_padding = min(s.n_vocab - s.n_token, N_PADDING)
        return TensorSpec(name, (s.n_embd, s.n_vocab), self.vocab, lambda r: make(r, n_padding), s.n_token + n_padding)

    def embedding(self) -> Iterator[TensorSpec]:
        s = self.shape
        yield self.vocabulary("token_embd.weight", lambda r, n: s.embd_rms * embeddings(r, self.topics, s.n_token, n))

    def head(self) -> Iterator[TensorSpec]:
        s = self.shape
        yield self.ones("output_norm.weight", s.n_embd)
        yield self.vocabulary("output.weight", lambda r, n: output_head(r, self.topics, s.n_token, n, s.topic_tokens, s.follow, s.n_control))

    def attention(self, b: str, n_head: int | None = None, q_factor: int = 1) -> Iterator[TensorSpec]:
        """q, k, v and output; q_factor 2: the query carries a gate."""
        s = self.shape
        n_head = n_head or s.n_head
        yield self.matrix(f"{b}attn_q.weight", s.n_embd, n_head * s.head_dim * q_factor)
        yield self.matrix(f"{b}attn_k.weight", s.n_embd, s.n_head_kv * s.head_dim)
        yield self.matrix(f"{b}attn_v.weight", s.n_embd, s.n_head_kv * s.head_dim)
        yield self.matrix(f"{b}attn_output.weight", n_head * s.head_dim, s.n_embd, 0.5)

    def qk_norms(self, b: str) -> Iterator[TensorSpec]:
        yield self.ones(f"{b}attn_q_norm.weight", self.shape.head_dim)
        yield self.ones(f"{b}attn_k_norm.weight", self.shape.head_dim)

    def feed_forward(self, b: str, n_ff: int, suffix: str = "") -> Iterator[TensorSpec]:
        n_embd = self.shape.n_embd
        yield self.matrix(f"{b}ffn_gate{suffix}.weight", n_embd, n_ff)
        yield self.matrix(f"{b}ffn_up{suffix}.weight", n_embd, n_ff)
        yield self.matrix(f"{b}ffn_down{suffix}.weight", n_ff, n_embd, 0.5)

    def experts(self, b: str, index: int) -> Iterator[TensorSpec]:
        """Router and experts; the products of an expert are of the size of the residual stream, so a wrong one shows."""
        s = self.shape
        yield TensorSpec(f"{b}ffn_gate_inp.weight", (s.n_embd, s.n_expert), T.F32,
                         lambda r: router(r, self.topics, s.n_expert, self.skew, s.affinity))  # fmt: skip
        std = 1 / s.n_embd**0.5
        if s.fused:
            yield TensorSpec(f"{b}ffn_gate_up_exps.weight", (s.n_embd, 2 * s.n_ff_exp, s.n_expert), self.expert, std)
        else:
            yield TensorSpec(f"{b}ffn_gate_exps.weight", (s.n_embd, s.n_ff_exp, s.n_expert), self.expert, std)
            yield TensorSpec(f"{b}ffn_up_exps.weight", (s.n_embd, s.n_ff_exp, s.n_expert), self.expert, std)
        down = self.down if s.down_is_high(index) else self.down_rest
        yield TensorSpec(f"{b}ffn_down_exps.weight", (s.n_ff_exp, s.n_embd, s.n_expert), down, 1 / s.n_ff_exp**0.5)
        if s.scales:
            for kind in ("gate", "up", "down"):
                yield self.values(f"{b}ffn_{kind}_exps.scale", (s.n_expert,), 0.1, 1.0)
