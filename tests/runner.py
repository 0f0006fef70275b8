"""Runs a model through llama.cpp's C API and records every logit, so that two runs can be compared bit by bit.

Chunks of tokens are given explicitly: the same chunks in both runs are the same matrix shapes, and on the CPU that makes
the arithmetic the same. No sampler is involved; greedy means argmax with the lowest id first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from pyspark_moe import _native
from pyspark_moe.placement import LayerPlan, ResidencyPlan
from pyspark_moe.store import Store

llama = _native.prepare_llama_cpp()

N_THREADS = 2


def plan_for(store: Store, fraction: float, policy: str = "frequency", *, initial: str = "first", pinned: float = 0.0,
             seed: int = 0) -> ResidencyPlan:
    """A plan that keeps `fraction` of each layer's experts in fast slots.

    initial: which experts start there: "first" (lowest ids), "last", "none". pinned: part of them that never leaves.
    """
    layers = []
    for info in store.layers:
        n_fast = round(fraction * info.n_expert)
        ids = list(range(info.n_expert))
        start = {"first": ids[:n_fast], "last": ids[::-1][:n_fast], "none": []}[initial]
        layers.append(LayerPlan(layer=info.layer, n_fast=n_fast, n_pinned=int(pinned * len(start)), initial=tuple(start)))
    return ResidencyPlan(layers=tuple(layers), policy=policy, seed=seed)


@dataclass
class Trace:
    """All logits of a run in order, and the tokens that argmax chose."""

    logits: list[np.ndarray] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def assert_same(self, other: "Trace") -> None:
        """Every logit equal bit by bit, every token equal; says where the first difference is."""
        assert len(self.logits) == len(other.logits)
        for step, (a, b) in enumerate(zip(self.logits, other.logits)):
            assert a.shape == b.shape
            different = np.flatnonzero((a.view(np.uint32) != b.view(np.uint32)).any(axis=1))
            assert different.size == 0, (
                f"step {step}: {different.size} of {len(a)} rows differ, first row {different[0]}, "
                f"largest difference {np.abs(a - b).max()}"
            )
        assert self.tokens == other.tokens

    def is_sane(self) -> bool:
        """Finite and not constant: a comparison of zeros or NaN proves nothing."""
        return all(np.isfinite(a).all() and a.std() > 1e-3 for a in self.logits)


class Model:
    """A loaded model; with a store, its experts come from there. Close contexts first."""

    def __init__(self, path: Path, store: Store | None = None, *, load_mode: int | None = None, load_mtp: bool = False, gpu: bool = False) -> None:
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 999 if gpu else 0
        params.split_mode = llama.LLAMA_SPLIT_MODE_NONE
        params.load_mode = llama.LLAMA_LOAD_MODE_NONE if load_mode is None else load_mode
        params.use_extra_bufts = False  # plain layout, as in a store: repacked weights are computed by other kernels
        params.load_mtp = load_mtp
        if store is not None:
            params.tensor_buft_overrides = store.overrides_address
        self.handle = llama.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.handle))

    def context(self, **settings: object) -> "Context":
        return Context(self, **settings)

    def adapter(self, path: Path) -> ctypes.c_void_p:
        """A LoRA adapter; it lives as long as the model."""
        handle = llama.llama_adapter_lora_init(self.handle, str(path).encode())
        if not handle:
            raise RuntimeError(f"llama.cpp could not load the adapter {path}")
        return handle

    def close(self) -> None:
        if self.handle:
            llama.llama_model_free(self.handle)
            self.handle = None

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Context:
    """A context that decodes explicit chunks."""

    def __init__(self, model: Model, *, n_ctx: int = 2560, n_batch: int = 2048, n_ubatch: int = 512, n_seq_max: int = 1,
                 n_threads: int = N_THREADS) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_ubatch
        params.n_seq_max, params.n_threads, params.n_threads_batch = n_seq_max, n_threads, n_threads
        params.kv_unified = True  # sequences of any length share the context
        params.no_perf = True
        self.model = model
        self.handle = llama.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise RuntimeError("llama.cpp could not create a context")
        self.memory = llama.llama_get_memory(self.handle)

    def decode(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int] | None = None, every: int = 1) -> np.ndarray:
        """float32[n_outputs, n_vocab]: logits of every `every`-th token from the last one backwards, in order."""
        n = len(tokens)
        batch = llama.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i in range(n):
                batch.token[i] = int(tokens[i])
                batch.pos[i] = int(positions[i])
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = int(sequences[i]) if sequences is not None else 0
                batch.logits[i] = (n - 1 - i) % every == 0
            status = llama.llama_decode(self.handle, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode of {n} tokens returned {status}")
        finally:
            llama.llama_batch_free(batch)
        rows = (n + every - 1) // every
        flat = np.ctypeslib.as_array(llama.llama_get_logits(self.handle), shape=(rows * self.model.n_vocab,))
        return flat.copy().reshape(rows, self.model.n_vocab)

    def set_adapter(self, adapter: ctypes.c_void_p | None, scale: float = 1.0) -> None:
        """Uses one adapter, or none."""
        if adapter is None:
            status = llama.llama_set_adapters_lora(self.handle, None, 0, None)
        else:
            status = llama.llama_set_adapters_lora(
                self.handle, (llama.llama_adapter_lora_p_ctypes * 1)(adapter), 1, (ctypes.c_float * 1)(scale)
            )
        if status != 0:
            raise RuntimeError(f"llama_set_adapters_lora returned {status}")

    def shift(self, first: int, last: int, by: int) -> None:
        """Context shift: forgets positions first..last-1 of sequence 0 and moves the later ones back by `by`."""
        if not llama.llama_memory_seq_rm(self.memory, 0, first, last):
            raise RuntimeError("this memory cannot forget a part of a sequence")
        llama.llama_memory_seq_add(self.memory, 0, last, -1, -by)

    @property
    def can_shift(self) -> bool:
        return bool(llama.llama_memory_can_shift(self.memory))

    def close(self) -> None:
        if self.handle:
            llama.llama_free(self.handle)
            self.handle = None

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def prompt(n: int, n_vocab: int, seed: int = 0, first: int = 300) -> list[int]:
    """n random token ids, special tokens left out."""
    return [int(t) for t in np.random.default_rng(seed).integers(first, n_vocab, n)]


def run_chunks(context: Context, sizes: Sequence[int], trace: Trace, seed: int = 0, start: int = 0) -> int:
    """Decodes consecutive chunks of these sizes; returns the next position."""
    tokens = prompt(sum(sizes), context.model.n_vocab, seed)
    position = 0
    for size in sizes:
        chunk = tokens[position : position + size]
        where = range(start + position, start + position + size)
        trace.logits.append(context.decode(chunk, where, every=1 if size <= 64 else 16))
        position += size
    return start + position


def run_greedy(context: Context, n: int, trace: Trace, position: int) -> int:
    """Generates n tokens one at a time after the last decoded one; returns the next position."""
    for _ in range(n):
        token = int(trace.logits[-1][-1].argmax())
        trace.tokens.append(token)
        trace.logits.append(context.decode([token], [position]))
        position += 1
    return position


def run_parallel(context: Context, n_seq: int, n: int, trace: Trace) -> None:
    """n_seq sequences with different prompts of different lengths, prefilled together, then decoded together; one ends
    half way, so that the batch shrinks."""
    lengths = [5 + 7 * s for s in range(n_seq)]
    tokens, positions, owners = [], [], []
    for s, length in enumerate(lengths):
        tokens += prompt(length, context.model.n_vocab, seed=100 + s)
        positions += range(length)
        owners += [s] * length
    logits = context.decode(tokens, positions, owners)
    trace.logits.append(logits)
    ends = np.cumsum(lengths) - 1
    current = [int(logits[e].argmax()) for e in ends]
    at = list(lengths)
    for step in range(n):
        live = list(range(n_seq if step < n // 2 else n_seq - 1))
        logits = context.decode([current[s] for s in live], [at[s] for s in live], live)
        trace.logits.append(logits)
        for row, s in enumerate(live):
            current[s] = int(logits[row].argmax())
            trace.tokens.append(current[s])
            at[s] += 1
