"""The experts of one model file, and where each of them is: struct spark_store of the C API."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import cffi
import numpy as np

from . import errors
from ._native import check, native
from .placement import ResidencyPlan

_POLICIES = {"frequency": "SPARK_POLICY_FREQUENCY", "static": "SPARK_POLICY_STATIC", "chaos": "SPARK_POLICY_CHAOS"}


@dataclass(frozen=True)
class LayerInfo:
    """One MoE layer. expert_bytes: bytes of one expert over all its tensors."""

    layer: int
    n_expert: int
    n_tensors: int
    expert_bytes: int


@dataclass(frozen=True)
class Stats:
    """Counters since the model was loaded; the fields of struct spark_stats, which explains them. Layer -1: the sum."""

    layer: int
    n_expert: int
    n_fast: int
    n_resident: int
    uses: int
    hits: int
    misses: int
    misses_home: int
    bytes_read: int
    bytes_home: int
    bytes_ahead: int
    reads_home: int
    reads_ahead: int
    promotions: int
    evictions: int
    fast_bytes: int
    locked_bytes: int
    read_ns: int
    steps: int
    steps_replayed: int

    @property
    def hit_rate(self) -> float | None:
        """hits / uses, 0 to 1; None before the first use."""
        return self.hits / self.uses if self.uses else None

    def as_dict(self) -> dict[str, int | float | None]:
        """For JSON; with hit_rate."""
        return {**asdict(self), "hit_rate": self.hit_rate}


def _make_stats(out: Any) -> Stats:
    return Stats(**{f.name: int(getattr(out, f.name)) for f in fields(Stats)})


@contextmanager
def _native_plan(ffi: cffi.FFI, lib: Any, plan: ResidencyPlan, n_expert: Mapping[int, int]) -> Iterator[Any]:
    """struct spark_plan *, with what it points to kept alive. n_expert: of each block."""
    layers = ffi.new("struct spark_layer_plan[]", max(1, len(plan.layers)))
    keep = []  # the arrays that `initial` points to
    for target, source in zip(layers, plan.layers):
        if source.hotness and len(source.hotness) != n_expert.get(source.layer):
            raise errors.InvalidArgumentError(f"Block {source.layer}: {len(source.hotness)} uses for {n_expert.get(source.layer, 0)} experts.")
        initial = ffi.new("int32_t[]", list(source.initial))
        hotness = ffi.new("double[]", list(source.hotness)) if source.hotness else ffi.NULL
        keep += [initial, hotness]
        target.layer, target.n_fast, target.n_pinned = source.layer, source.n_fast, source.n_pinned
        target.n_initial, target.initial, target.hotness = len(source.initial), initial, hotness
    result = ffi.new("struct spark_plan *")
    result.n_layers, result.layers = len(plan.layers), layers
    result.policy, result.seed = getattr(lib, _POLICIES[plan.policy]), plan.seed
    result.staging_bytes = plan.staging_bytes
    yield result


class Store:
    """The experts of one model file. Load that model, and no other, with `overrides_address` as llama.cpp's
    `tensor_buft_overrides`. All methods may be called from any thread; after close() they raise errors.StateError.

    io_threads  threads that read missed experts, 1..64; 0 (default): the library's choice
    direct_io   read past the page cache where the file system allows; default True
    lock_fast   lock fast slots in RAM as far as the limit allows; default True
    device      ggml's name of the GPU that holds the fast slots ("CUDA0"), every expert then has its home in pinned RAM;
                default "": fast slots in RAM, homes in the file

    Raises ModelNotFoundError, ModelFileError, NoExpertsError, OutOfMemoryError, BuildError.
    """

    def __init__(
        self, model_path: str | Path, *, io_threads: int = 0, direct_io: bool = True, lock_fast: bool = True, device: str = ""
    ) -> None:
        self._handle: Any = None
        self._users = 0
        self._idle = threading.Condition()
        self.path = Path(model_path)
        ffi, lib = native()
        path = ffi.new("char[]", os.fsencode(model_path))
        params = ffi.new("struct spark_store_params *")
        device_name = ffi.new("char[]", device.encode())
        params.model_path, params.n_io_threads, params.direct_io, params.lock_fast = path, io_threads, direct_io, lock_fast
        params.device = device_name
        out = ffi.new("struct spark_store **")
        check(lib.spark_store_init(params, out))
        self._handle = out[0]
        self.layers: tuple[LayerInfo, ...] = tuple(self._layer_info(i) for i in range(lib.spark_store_n_layers(out[0])))
        self._n_expert = {layer.layer: layer.n_expert for layer in self.layers}

    def _layer_info(self, index: int) -> LayerInfo:
        ffi, lib = native()
        out = ffi.new("struct spark_layer_info *")
        check(lib.spark_store_get_layer_info(self._handle, index, out))
        return LayerInfo(out.layer, out.n_expert, out.n_tensors, out.expert_bytes)

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Any, Any]]:
        """(ffi, lib, handle), kept open until the call has returned: another thread may be in close()."""
        with self._idle:
            if self._handle is None:
                raise errors.StateError(f"The store of '{self.path}' is closed.")
            self._users += 1
            handle = self._handle
        try:
            yield (*native(), handle)
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def set_plan(self, plan: ResidencyPlan) -> None:
        """Sets slots and initial experts; before the model is loaded. Raises InvalidArgumentError, StateError."""
        with self._open() as (ffi, lib, handle), _native_plan(ffi, lib, plan, self._n_expert) as native_plan:
            check(lib.spark_store_set_plan(handle, native_plan))

    def place(self, plan: ResidencyPlan) -> None:
        """The same for a model that is loaded. On a device running steps are waited for; in RAM none may run, so call it on the
        thread that computes. Raises InvalidArgumentError, StateError (nothing changed), OutOfMemoryError (see spark_moe.h)."""
        with self._open() as (ffi, lib, handle), _native_plan(ffi, lib, plan, self._n_expert) as native_plan:
            check(lib.spark_store_place(handle, native_plan))

    @property
    def overrides_address(self) -> int:
        """Address of an array of llama_model_tensor_buft_override; it lives as long as the process."""
        with self._open() as (ffi, lib, handle):
            return int(ffi.cast("uintptr_t", lib.spark_store_get_overrides(handle)))

    @property
    def handle(self) -> Any:
        """The cffi pointer, for spark_server_run. Valid until close()."""
        with self._open() as (_, _, handle):
            return handle

    @property
    def is_loaded(self) -> bool:
        """True from the moment llama.cpp has allocated the experts of a model until that model is freed."""
        with self._open() as (_, lib, handle):
            return bool(lib.spark_store_is_loaded(handle))

    @property
    def is_closed(self) -> bool:
        return self._handle is None

    def stats(self) -> Stats:
        """Counters, summed over layers."""
        with self._open() as (ffi, lib, handle):
            out = ffi.new("struct spark_stats *")
            check(lib.spark_store_get_stats(handle, out))
            return _make_stats(out)

    def layer_stats(self) -> tuple[Stats, ...]:
        """Counters of each MoE layer, in the order of `layers`."""
        with self._open() as (ffi, lib, handle):
            out = ffi.new("struct spark_stats *")
            result = []
            for index in range(len(self.layers)):
                check(lib.spark_store_get_layer_stats(handle, index, out))
                result.append(_make_stats(out))
            return tuple(result)

    def residency(self, index: int) -> np.ndarray:
        """int32 [n_expert]: the fast slot of each expert of `layers[index]`, -1 when it is read from home."""
        return self._fill("spark_store_get_residency", "int32_t[]", np.int32, index)

    def counts(self, index: int) -> np.ndarray:
        """uint64 [n_expert]: uses of each expert of `layers[index]` since the model was loaded."""
        return self._fill("spark_store_get_counts", "uint64_t[]", np.uint64, index)

    def _fill(self, function: str, c_type: str, dtype: type, index: int) -> np.ndarray:
        if not 0 <= index < len(self.layers):
            raise errors.InvalidArgumentError(f"Layer index {index}: this model has MoE layers 0 to {len(self.layers) - 1} by index.")
        with self._open() as (ffi, lib, handle):
            result = np.empty(self.layers[index].n_expert, dtype=dtype)
            check(getattr(lib, function)(handle, index, ffi.from_buffer(c_type, result, require_writable=True), result.size))
            return result

    def reset_stats(self) -> None:
        """Puts the counters back to zero; residency stays."""
        with self._open() as (_, lib, handle):
            check(lib.spark_store_reset_stats(handle))

    def wait_idle(self, timeout_s: float = 10.0) -> bool:
        """Waits until the swap engine has nothing to do; False when it is still busy after `timeout_s` seconds."""
        with self._open() as (_, lib, handle):
            status = lib.spark_store_wait_idle(handle, int(timeout_s * 1000))
            if status == lib.SPARK_STATUS_BAD_STATE:
                return False
            check(status)
            return True

    def close(self) -> None:
        """Frees the store; again is allowed. Waits for calls that other threads are in."""
        with self._idle:
            handle, self._handle = self._handle, None
            while self._users:
                self._idle.wait()
        if handle is not None:
            native()[1].spark_store_free(handle)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store of '{self.path}', {'closed' if self.is_closed else f'{len(self.layers)} MoE layers'}>"
