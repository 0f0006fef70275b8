"""libspark_moe's speculation of one context: the C calls, and when it is freed."""
from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import draft
from .._native import check, native, prepare_llama_cpp
from ..errors import ConfigError, ModelFileError, ModelLoadError, StateError
from ..load_log import LoadLog
from .sampling import Sampling
from .statistics import SpeculationStats, Step

_open: weakref.WeakKeyDictionary[Any, Handle] = weakref.WeakKeyDictionary()  # llama_cpp's context object -> its handle


class Handle:
    """A draft beside the context of a llama_cpp.Llama, for its sequence 0. One thread, one for each context at a time.

    It is freed by close(), which may be called again, and at the latest when llama_cpp frees the context, whatever frees that:
    the context would not survive it. Calls raise StateError afterwards.

    llm         a loaded llama_cpp.Llama; arguments: what draft.resolve() gave for the pair
    Raises ConfigError, StateError, InvalidArgumentError, ModelLoadError (the draft cannot be loaded), OutOfMemoryError.
    """

    def __init__(self, llm: Any, arguments: Sequence[str], *, n_draft: int, n_gpu_layers: int, exact_verify: bool, measure_heads: bool = False) -> None:
        self._pointer: Any = None
        self.n_draft = n_draft
        if n_draft < 1:
            raise ConfigError(f"{n_draft} tokens to draft at a time: propose 1 or more.")
        if llm.context_params.embeddings:
            raise ConfigError("embedding=True makes a context for embeddings, which writes no text: load the model without it, or without a draft.")
        context = llm._ctx
        if getattr(_open.get(context), "_pointer", None) is not None:
            raise StateError("This model has a draft already: close that one first.")
        options = dict(zip(arguments[::2], arguments[1::2]))
        ffi, lib = native()
        path = ffi.new("char[]", os.fsencode(options.get("--spec-draft-model", "")))
        kind = ffi.new("char[]", options["--spec-type"].encode())
        params = ffi.new("struct spark_speculation_params *")
        params.context = ffi.cast("struct llama_context *", ctypes.cast(context.ctx, ctypes.c_void_p).value)
        params.draft_path, params.type = path, kind
        params.n_draft, params.n_gpu_layers, params.exact_verify, params.measure_heads = n_draft, n_gpu_layers, exact_verify, measure_heads
        out = ffi.new("struct spark_speculation **")
        with LoadLog(prepare_llama_cpp()) as log:
            try:
                check(lib.spark_speculation_init(params, out))
            except ModelFileError as e:
                raise ModelLoadError(f"{str(e).rstrip('.')}. llama.cpp says:\n{log.tail()}") from e
        self._pointer = out[0]
        _open[context] = self
        context._exit_stack.callback(self.close)  # runs before llama_cpp's own, which frees the context

    def _native(self) -> tuple[Any, Any, Any]:
        if self._pointer is None:
            raise StateError("The draft is closed, or its model is.")
        return (*native(), self._pointer)

    @property
    def n_past(self) -> int:
        """Tokens in the memory of the context."""
        _, lib, pointer = self._native()
        return int(lib.spark_speculation_n_past(pointer))

    def begin(self, prompt: Sequence[int], sampling: Sampling) -> int:
        ffi, lib, pointer = self._native()
        native_sampling = ffi.new("struct spark_sampling *")
        grammar = ffi.new("char[]", sampling.grammar.encode())
        native_sampling.seed, native_sampling.grammar = sampling.native_seed, grammar
        for name in ("temperature", "top_k", "top_p", "min_p", "penalty_last_n", "penalty_repeat", "penalty_frequency", "penalty_presence"):
            setattr(native_sampling, name, getattr(sampling, name))
        token = ffi.new("int32_t *")
        check(lib.spark_speculation_begin(pointer, _tokens(ffi, prompt), len(prompt), native_sampling, token))
        return int(token[0])

    def draft(self, n_max: int) -> list[int]:
        ffi, lib, pointer = self._native()
        n_max = min(n_max, self.n_draft)
        out, n = ffi.new("int32_t[]", max(1, n_max)), ffi.new("int32_t *")
        check(lib.spark_speculation_draft(pointer, n_max, out, n))
        return list(out[0 : n[0]])

    def verify(self, drafted: Sequence[int]) -> list[int]:
        ffi, lib, pointer = self._native()
        out, n = ffi.new("int32_t[]", len(drafted) + 1), ffi.new("int32_t *")
        check(lib.spark_speculation_verify(pointer, _tokens(ffi, drafted), len(drafted), out, n))
        return list(out[0 : n[0]])

    def accept(self, written: Sequence[int], n_keep: int) -> Step:
        """written: what verify() gave."""
        ffi, lib, pointer = self._native()
        out = ffi.new("struct spark_speculation_step *")
        check(lib.spark_speculation_accept(pointer, n_keep, out))
        names = [name for name in Step.__dataclass_fields__ if name not in ("tokens", "heads_ms")]
        return Step(tuple(written[:n_keep]), heads_ms=_measured(out.heads_ms), **{name: getattr(out, name) for name in names})

    def decode(self, tokens: Sequence[int], pos0: int, logits: str) -> None:
        """Computes tokens at positions pos0..; logits: "last", "all", or "verify" (all, rounded as single ones)."""
        ffi, lib, pointer = self._native()
        check(lib.spark_speculation_decode(pointer, _tokens(ffi, tokens), len(tokens), pos0, getattr(lib, f"SPARK_SPECULATION_LOGITS_{logits.upper()}")))

    def propose(self, last: int, pos: int) -> list[int]:
        ffi, lib, pointer = self._native()
        out, n = ffi.new("int32_t[]", self.n_draft), ffi.new("int32_t *")
        check(lib.spark_speculation_propose(pointer, last, pos, self.n_draft, out, n))
        return list(out[0 : n[0]])

    def keep(self, n_accepted: int) -> None:
        _, lib, pointer = self._native()
        check(lib.spark_speculation_keep(pointer, n_accepted))

    def adopt(self, tokens: Sequence[int]) -> None:
        """The memory of the context was filled by something else, with these tokens."""
        ffi, lib, pointer = self._native()
        check(lib.spark_speculation_adopt(pointer, _tokens(ffi, tokens), len(tokens)))

    def stats(self) -> SpeculationStats:
        ffi, lib, pointer = self._native()
        out = ffi.new("struct spark_speculation_stats *")
        check(lib.spark_speculation_get_stats(pointer, out))
        n = out.n_depths
        drafted_at, accepted_at = ffi.new("uint64_t[]", max(1, n)), ffi.new("uint64_t[]", max(1, n))
        check(lib.spark_speculation_get_depths(pointer, drafted_at, accepted_at, n))
        others = {"drafted_at": tuple(drafted_at[0:n]), "accepted_at": tuple(accepted_at[0:n]), "heads_ms": _measured(out.heads_ms)}
        names = [name for name in SpeculationStats.__dataclass_fields__ if name not in others]
        return SpeculationStats(**{name: getattr(out, name) for name in names}, **others)

    def close(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            native()[1].spark_speculation_free(pointer)


def resolve(draft_path: str | os.PathLike[str] | None, target_path: str) -> list[str]:
    """draft.resolve() for a pair; None: the next-token head in the target's own file. Raises DraftError."""
    return draft.resolve(target_path if draft_path is None else Path(draft_path), target_path)


def _measured(ms: float) -> float | None:
    return ms if ms >= 0 else None


def _tokens(ffi: Any, tokens: Sequence[int]) -> Any:
    """int32_t[], never of length 0: a pointer that C may look at."""
    try:
        return ffi.new("int32_t[]", list(tokens) or 1)
    except (OverflowError, TypeError) as e:
        raise ConfigError(f"tokens are integers of the model's vocabulary: {e}.") from e
