"""Texts that a loaded model reads so that the experts they need are counted: struct spark_prefill of the C API."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ._native import check, native


class Prefill:
    """Texts that a loaded model reads so that the experts they need are counted. While it is open the context computes
    nothing else; close() leaves its memory empty. One thread.

    context    the model's llama_context: a cffi pointer, or its address
    n_outputs  of a micro-batch that the context allows (llama.cpp's n_outputs_max). Default 1, which every context does: the
               experts of the last layer are then counted for one token of each micro-batch

    Raises InvalidArgumentError, InternalError.
    """

    def __init__(self, context: Any, n_outputs: int = 1) -> None:
        ffi, lib = native()
        self._handle: Any = None
        out = ffi.new("struct spark_prefill **")
        check(lib.spark_prefill_init(ffi.cast("struct llama_context *", context), n_outputs, out))
        self._handle = out[0]

    def begin_chat(self, messages: str, n_max: int) -> tuple[int, bool]:
        """Renders a conversation, a JSON array of OpenAI's messages, as the server would; (tokens to compute, True where the
        model's template refused it and it is read as plain text). Raises InvalidArgumentError for what is no conversation."""
        ffi, lib = native()
        text = messages.encode("utf-8", errors="replace")
        n, is_plain = ffi.new("int32_t *"), ffi.new("bool *")
        check(lib.spark_prefill_begin_chat(self._handle, text, len(text), n_max, n, is_plain))
        return int(n[0]), bool(is_plain[0])

    def begin_text(self, text: str, n_max: int) -> int:
        """Tokens of plain text, at most n_max and what the context holds."""
        ffi, lib = native()
        encoded = text.encode("utf-8", errors="replace")
        n = ffi.new("int32_t *")
        check(lib.spark_prefill_begin_text(self._handle, encoded, len(encoded), n_max, n))
        return int(n[0])

    def step(self) -> int:
        """Computes the next micro-batch; tokens that are left. Raises InternalError when llama.cpp cannot."""
        ffi, lib = native()
        n = ffi.new("int32_t *")
        check(lib.spark_prefill_step(self._handle, n))
        return int(n[0])

    def close(self) -> None:
        """Empties the context's memory; again is allowed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            native()[1].spark_prefill_free(handle)

    def __enter__(self) -> Prefill:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
