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
import logging
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import cffi

from . import errors

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
    _repair_log_levels()
    return llama_cpp


def _repair_log_levels() -> None:
    """llama-cpp-python 0.3.36 reads levels as ggml numbered them once: with verbose=False warnings pass and errors are dropped."""
    import llama_cpp._logger as its

    levels = its.GGML_LOG_LEVEL_TO_LOGGING_LEVEL
    if levels.get(3) == logging.ERROR and levels.get(4) == logging.DEBUG:
        levels.update({0: logging.CRITICAL, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR})


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


def set_fused_qkv(enabled: bool) -> None:
    """Whether models loaded from now on read Q, K and V of a layer as one matrix for up to eight tokens, where they are of one type and
    lie next to each other, as on a GPU (default: they do). Every row rounds as before."""
    native()[1].spark_set_fused_qkv(enabled)
