"""Records what a model selects while llama.cpp computes it, through its evaluation callback. Any architecture and backend.

llama.cpp names the nodes of a routed layer: `ffn_moe_logits-<block>` is the product of the router's weight and its input,
`ffn_moe_topk-<block>` the selected experts. The callback stops behind these two and reads them from wherever they are.

Fields of ggml's tensors have no accessors in its C API, and a copy of the structure here would be wrong one day without
saying so. Shapes and strides therefore follow from the functions that do exist, and where a node keeps its sources is
looked up in a node that ggml itself makes (_source_offset).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import cffi
import numpy as np

from ._native import library_directory, native, prepare_llama_cpp
from .errors import ConfigError, StateError
from .llm import SparkLlama
from .model_info import ModelInfo
from .routing_trace import TraceHeader, TraceWriter

llama_cpp = prepare_llama_cpp()

_NODE = re.compile(rb"ffn_moe_(logits|topk)-(\d{1,6})")
_DECLARATIONS = """
    struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
    void * ggml_init(struct ggml_init_params params);
    void   ggml_free(void * ctx);
    size_t ggml_used_mem(const void * ctx);
    size_t ggml_tensor_overhead(void);
    void * ggml_new_tensor_2d(void * ctx, int type, int64_t ne0, int64_t ne1);
    void * ggml_mul_mat(void * ctx, void * a, void * b);
    const char * ggml_get_name(const void * tensor);
    const char * ggml_op_desc(const void * tensor);
    int64_t ggml_nelements(const void * tensor);
    int64_t ggml_nrows(const void * tensor);
    size_t  ggml_nbytes(const void * tensor);
    size_t  ggml_element_size(const void * tensor);
    bool    ggml_is_contiguous(const void * tensor);
    void    ggml_backend_tensor_get(const void * tensor, void * data, size_t offset, size_t size);
"""


@functools.cache
def _ggml() -> tuple[cffi.FFI, Any]:
    native()
    ffi = cffi.FFI()
    ffi.cdef(_DECLARATIONS)
    return ffi, ffi.dlopen(str(library_directory() / "libggml-base.so"))


@functools.cache
def _source_offset() -> int:
    """Bytes from the start of a tensor to its list of sources: ggml makes a product of two tensors, whose addresses are then
    found in it. Raises StateError when they are not."""
    ffi, lib = _ggml()
    size = 8 * lib.ggml_tensor_overhead()
    memory = ffi.new("char[]", size)
    ctx = lib.ggml_init({"mem_size": size, "mem_buffer": memory, "no_alloc": True})
    if ctx == ffi.NULL:
        raise StateError("ggml refuses to make a context: it does not belong to this version. Build again with `make build`.")
    try:
        a, b = (lib.ggml_new_tensor_2d(ctx, 0, 4, 4) for _ in range(2))
        product = lib.ggml_mul_mat(ctx, a, b)
        begin = int(ffi.cast("uintptr_t", product)) - int(ffi.cast("uintptr_t", memory))
        data = bytes(ffi.buffer(memory, size))[begin : lib.ggml_used_mem(ctx)]
        at = data.find(b"".join(int(ffi.cast("uintptr_t", t)).to_bytes(8, "little") for t in (a, b)))
    finally:
        lib.ggml_free(ctx)
    if at < 0:
        raise StateError("ggml keeps the sources of a node where they cannot be found: record without the routers' inputs.")
    return at


def _rows(tensor: Any, dtype: str) -> np.ndarray:
    """A copy of a two-dimensional tensor [rows, row length] of 4-byte elements whose rows may be apart, from any backend."""
    ffi, lib = _ggml()
    if lib.ggml_element_size(tensor) != 4:
        raise StateError(f"Node '{ffi.string(lib.ggml_get_name(tensor)).decode(errors='replace')}' has elements of another size than 4 bytes.")
    n_bytes, n_rows = lib.ggml_nbytes(tensor), lib.ggml_nrows(tensor)
    length = lib.ggml_nelements(tensor) // n_rows
    data = np.empty(n_bytes // 4, dtype=dtype)
    lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(data), 0, n_bytes)
    stride = (n_bytes - 4 * length) // (n_rows - 1) if n_rows > 1 else n_bytes
    return np.lib.stride_tricks.as_strided(data, (n_rows, length), (stride, 4)).copy()


def trace_header(model: ModelInfo, *, hidden: bool = False, fingerprint: str = "") -> TraceHeader:
    """The header of a trace of this model. Raises ConfigError when it has no experts."""
    if not model.is_moe:
        raise ConfigError(f"'{model.path}' is a dense model: it has no routing to record.")
    return TraceHeader(
        layers=tuple(layer.layer for layer in model.layers),
        n_expert=tuple(layer.n_expert for layer in model.layers),
        n_used=model.n_expert_used,
        n_embd=model.n_embd,
        strides=tuple(layer.strides for layer in model.layers),
        hidden="float16" if hidden else "",
        model=model.name,
        fingerprint=fingerprint,
    )


class Recorder:
    """Writes what one llama.cpp context selects to a trace; give it to one RecordedLlama. The writer stays the caller's."""

    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer
        self.is_on = False
        self.error: BaseException | None = None
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
        self._index = {layer: i for i, layer in enumerate(writer.header.layers)}
        self._inputs: dict[int, np.ndarray] = {}
        if writer.header.hidden:
            _source_offset()

    def check(self) -> None:
        """Raises what went wrong since the last call; a callback from C cannot."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _on_node(self, address: int, is_question: bool, _user_data: object) -> bool:
        """True: yes, this node is wanted; or, once it is computed: go on."""
        if not self.is_on or self.error is not None:
            return not is_question
        try:
            ffi, lib = _ggml()
            tensor = ffi.cast("void *", address)
            match = _NODE.fullmatch(ffi.string(lib.ggml_get_name(tensor)))
            index = self._index.get(int(match[2])) if match else None
            if match is None or index is None or (match[1] == b"logits" and not self.writer.header.hidden):
                return not is_question
            if not is_question:
                if match[1] == b"logits":
                    self._inputs[index] = self._router_input(tensor)
                else:
                    self.writer.add(index, _rows(tensor, "<i4"), self._inputs.pop(index, None))
            return True
        except BaseException as e:  # kept for check(): nothing may leave a callback
            self.error = e
            return not is_question

    @staticmethod
    def _router_input(logits: Any) -> np.ndarray:
        ffi, lib = _ggml()
        if ffi.string(lib.ggml_op_desc(logits)) != b"MUL_MAT":
            raise StateError("The router is no plain product (an adapter changes it?), so its input is not known: record without the routers' inputs.")
        tensor = ffi.cast("void **", ffi.cast("char *", logits) + _source_offset())[1]
        return _rows(tensor, "<f4")


class RecordedLlama(SparkLlama):
    """SparkLlama whose routing a Recorder writes down, from the end of loading on; all arguments of SparkLlama.

    Loading fills `context_params` as llama_cpp.Llama does; here it is a property whose setter adds the callback.
    """

    def __init__(self, model_path: str | os.PathLike[str], *, recorder: Recorder, **kwargs: Any) -> None:
        self._recorder = recorder  # longer than the context, which calls it
        super().__init__(model_path, **kwargs)
        recorder.is_on = True

    @property
    def context_params(self) -> Any:
        """llama_context_params of this model, as llama_cpp.Llama fills them."""
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        params.cb_eval = self._recorder.callback
        self._context_params = params

    def read(self, tokens: Sequence[int]) -> None:
        """Computes these tokens from an empty context, n_batch at a time, every token in every layer. At most n_ctx tokens.

        Raises TraceError, StateError: what the recorder met.
        """
        self.reset()
        self._ctx.kv_cache_clear()
        for first in range(0, len(tokens), self.n_batch):
            # eval() would ask for the last token's logits alone, and the last layer would not compute the others
            self._batch.set_batch(batch=tokens[first : first + self.n_batch], n_past=first, logits_all=True)
            self._ctx.decode(self._batch)
            self._recorder.check()
