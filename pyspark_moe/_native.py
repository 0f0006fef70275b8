"""libspark_moe from Python: cffi in ABI mode over the marked part of spark_moe.h.

Who owns what at this boundary:

| thing | owner | rule |
|---|---|---|
| store, its threads and fast slots | C++ | one `Store` object owns the handle; `close()` frees it, any number of times; memory that a loaded model reads outlives it |
| parameters, plan | Python | copied by C++ before the call returns |
| counters, residency, counts | caller | allocated here, filled by C++; no pointer into a store leaves it |
| override table (`overrides_address`) | C++, for ever | lives as long as the process, so llama.cpp may keep the address |
| error text | C++, per thread | copied to `str` at once, in the failing thread, by `check()` |
| GIL | released by cffi during every call | C++ functions take their own locks |

Nothing is loaded at import: the first use loads the library and checks version and structure sizes.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import cffi
import numpy as np

from . import errors
from .placement import ResidencyPlan

LLAMA_CPP_PYTHON_VERSION = "0.3.36"
_LIBRARY = "libspark_moe.so"
_BEGIN, _END = "/* cffi:begin */", "/* cffi:end */"
# enum spark_struct, in order
_STRUCTS = (
    "spark_store_params",
    "spark_layer_info",
    "spark_layer_plan",
    "spark_plan",
    "spark_stats",
    "spark_server_model",
    "spark_server_callbacks",
    "spark_device_info",
    "spark_draft_params",
    "spark_speculation_params",
    "spark_sampling",
    "spark_speculation_step",
    "spark_speculation_stats",
)
_POLICIES = {"frequency": "SPARK_POLICY_FREQUENCY", "static": "SPARK_POLICY_STATIC", "chaos": "SPARK_POLICY_CHAOS"}


def library_directory() -> Path:
    """The folder with libspark_moe, libllama, libggml* and libllama-server-impl.

    The folder of the package and the one it was installed to are searched: an editable install keeps sources and
    libraries apart. Raises errors.BuildError.
    """
    import pyspark_moe

    folders = [Path(folder) / "lib" for folder in pyspark_moe.__path__]
    try:
        installed = importlib.metadata.distribution("pyspark_moe").locate_file("pyspark_moe/lib")
        folders.append(Path(str(installed)))
    except importlib.metadata.PackageNotFoundError:
        pass  # run from a checkout that was never installed: the message below says what to do
    for folder in dict.fromkeys(folders):
        if (folder / _LIBRARY).is_file():
            return folder
    raise errors.BuildError(
        f"The native libraries of pyspark_moe are missing ({_LIBRARY} is in none of: {', '.join(map(str, dict.fromkeys(folders)))}). "
        "Build them: `make build` in a checkout, or install the package again."
    )


def build_info() -> dict[str, Any]:
    """What the build recorded about itself (build_info.json). Raises errors.BuildError."""
    path = library_directory() / "build_info.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise errors.BuildError(f"'{path}' cannot be read ({e}): build again with `make build`.") from e


def declarations(header_text: str) -> str:
    """The part of spark_moe.h that cffi parses. Raises errors.BuildError when the markers are missing."""
    _, begin, rest = header_text.partition(_BEGIN)
    body, end, _ = rest.partition(_END)
    if not begin or not end:
        raise errors.BuildError(f"spark_moe.h lacks its markers {_BEGIN} and {_END}: build again with `make build`.")
    return body


def open_library(header_text: str, library_path: Path) -> tuple[cffi.FFI, Any]:
    """Loads the library and compares it with the header: ABI mode trusts the text for sizes, so both are checked.

    Raises errors.BuildError.
    """
    ffi = cffi.FFI()
    try:
        ffi.cdef(declarations(header_text))
    except (cffi.CDefError, cffi.FFIError) as e:
        raise errors.BuildError(f"spark_moe.h cannot be parsed ({e}): build again with `make build`.") from e
    try:
        lib = ffi.dlopen(str(library_path))
    except OSError as e:
        raise errors.BuildError(f"'{library_path}' cannot be loaded: {e}. Build again with `make build`.") from e
    mismatch = None
    if lib.spark_api_version() != lib.SPARK_API_VERSION:
        mismatch = f"its API version is {lib.spark_api_version()}, the header's {lib.SPARK_API_VERSION}"
    for which, name in enumerate(_STRUCTS):
        try:
            compiled, declared = lib.spark_sizeof(which), ffi.sizeof(f"struct {name}")
        except (cffi.FFIError, cffi.CDefError, ValueError):
            mismatch = f"the header has no struct {name}"
            break
        if compiled != declared:
            mismatch = f"struct {name} has {compiled} bytes in the library and {declared} in the header"
    if mismatch:
        raise errors.BuildError(f"'{library_path}' does not belong to its spark_moe.h: {mismatch}. Build again with `make build`.")
    return ffi, lib


@functools.cache
def native() -> tuple[cffi.FFI, Any]:
    """(ffi, lib), loaded once per process. Raises errors.BuildError."""
    folder = library_directory()
    try:
        header = (folder / "spark_moe.h").read_text(encoding="utf-8")
    except OSError as e:
        raise errors.BuildError(f"'{folder / 'spark_moe.h'}' cannot be read ({e}): build again with `make build`.") from e
    ffi, lib = open_library(header, folder / _LIBRARY)
    if build_info().get("portable"):
        # Backends are plug-ins in such a build; llama.cpp looks for them next to the program, which is Python.
        loader = cffi.FFI()
        loader.cdef("void ggml_backend_load_all_from_path(const char *);")
        loader.dlopen(str(folder / "libggml.so")).ggml_backend_load_all_from_path(os.fsencode(folder))
    return ffi, lib


def prepare_llama_cpp() -> ModuleType:
    """Imports llama_cpp on top of this package's libraries, and returns it.

    llama-cpp-python reads LLAMA_CPP_LIB_PATH when it is imported, so this must come first. Raises errors.BuildError when
    llama_cpp was imported with other libraries, is not installed, or is another version than the libraries.
    """
    folder = library_directory()
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is not None:
        base = Path(getattr(loaded, "_base_path", ""))
        if base.resolve() != folder.resolve():
            raise errors.BuildError(
                f"llama_cpp was imported before pyspark_moe and loaded the libraries of '{base}'. Import pyspark_moe first."
            )
    else:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    try:
        import llama_cpp
    except ImportError as e:
        raise errors.BuildError(f"llama_cpp cannot be imported ({e}): install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}.") from e
    built_from = build_info().get("llama_cpp_python")
    if llama_cpp.__version__ != built_from:
        raise errors.BuildError(
            f"llama-cpp-python is version {llama_cpp.__version__}, but the libraries were built from {built_from}; their "
            f"structures differ. Install it: pip install llama-cpp-python=={built_from} (Python part only, see docs/guide/building.md)."
        )
    return llama_cpp


def check(status: int) -> None:
    """Raises the class of errors.BY_STATUS for a status that is not OK, with the library's own text."""
    if status == 0:
        return
    ffi, lib = native()
    text = ffi.string(lib.spark_last_error()).decode("utf-8", errors="replace")
    kind = errors.BY_STATUS.get(status, errors.InternalError)
    raise kind(text or f"libspark_moe failed with status {status} and said nothing more.")


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU of this build's ggml; `name` is what a Store takes as `device`."""

    name: str
    description: str
    pci_bus_id: str


def devices() -> tuple[DeviceInfo, ...]:
    """The GPUs that can hold fast slots, in ggml's order; takes no memory on them. Raises BuildError."""
    ffi, lib = native()
    out = ffi.new("struct spark_device_info *")
    found = []
    while lib.spark_device_get_info(len(found), out) == lib.SPARK_STATUS_OK:
        found.append(DeviceInfo(*(ffi.string(getattr(out, f.name)).decode(errors="replace") for f in fields(DeviceInfo))))
    return tuple(found)


def device_memory(name: str) -> tuple[int, int]:
    """(total, free) bytes of a device, for all processes together. Raises InvalidArgumentError."""
    ffi, lib = native()
    free, total = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    check(lib.spark_device_get_memory(name.encode(), free, total))
    return int(total[0]), int(free[0])


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


def set_fused_qkv(enabled: bool) -> None:
    """Whether models loaded from now on read Q, K and V of a layer as one matrix for up to eight tokens, where they are of one type and
    lie next to each other, as on a GPU (default: they do). Every row rounds as before."""
    native()[1].spark_set_fused_qkv(enabled)


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
