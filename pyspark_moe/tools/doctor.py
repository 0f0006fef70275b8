"""pyspark-moe doctor: what this build and this machine offer."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import cffi
import click

from .. import __version__, _native, errors
from ..budget import format_bytes
from ..memory import MachineMemory, read_machine_memory

# CPU features that llama.cpp has code for; others are of no interest here.
_FEATURES = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "sve", "sve2",
)
_PACKAGES = ("llama-cpp-python", "cffi", "click", "gguf", "numpy")


def _cpu(root: Path = Path("/")) -> tuple[str, list[str]]:
    """Name and features of the first processor."""
    name, found = platform.machine(), set()
    try:
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                found = set(value.split())
                break
    except OSError:
        pass  # the name of the machine's kind is all there is then
    return name, [f for f in _FEATURES if f in found]


def _backends() -> list[str]:
    """The devices that the built ggml finds, one line each. Raises errors.BuildError."""
    _native.native()
    ffi = cffi.FFI()
    ffi.cdef(
        """
        typedef struct ggml_backend_device * ggml_backend_dev_t;
        void ggml_backend_load_all(void);
        size_t ggml_backend_dev_count(void);
        ggml_backend_dev_t ggml_backend_dev_get(size_t index);
        const char * ggml_backend_dev_name(ggml_backend_dev_t device);
        const char * ggml_backend_dev_description(ggml_backend_dev_t device);
        """
    )
    folder = _native.library_directory()
    ggml, base = ffi.dlopen(str(folder / "libggml.so")), ffi.dlopen(str(folder / "libggml-base.so"))

    def text(function: str, device: object) -> str:
        return ffi.string(getattr(base, function)(device)).decode(errors="replace")

    devices = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
    return [f"{text('ggml_backend_dev_name', d)}: {text('ggml_backend_dev_description', d)}" for d in devices]


def _memory_lines(memory: MachineMemory) -> list[tuple[str, str]]:
    lines = [("memory", f"{format_bytes(memory.physical_bytes)}, {format_bytes(memory.physical_available_bytes)} available")]
    group = memory.cgroup
    if group:
        text = f"{format_bytes(group.limit_bytes)}, {format_bytes(group.available_bytes)} available (cgroup v{group.version}, {group.path})"
    else:
        text = "no memory limit"
    lines.append(("control group", text))
    if memory.memlock_bytes is None:
        lock = "no limit: fast slots are locked in RAM"
    else:
        lock = f"{format_bytes(memory.memlock_bytes)}: fast slots beyond it are not locked and may be swapped out (raise it: ulimit -l)"
    lines.append(("lockable memory", lock))
    return lines


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@click.command()
def doctor() -> int:
    """Shows versions, backends, and memory limits; exit status 1 when the build cannot be used."""
    cpu, features = _cpu()
    lines = [
        ("pyspark-moe", f"{__version__}, Python {platform.python_version()} ({sys.executable})"),
        ("packages", ", ".join(f"{p} {_version(p)}" for p in _PACKAGES)),
        ("system", f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs"),
        ("CPU", cpu),
        ("CPU features", ", ".join(features) or "none of those llama.cpp uses"),
        *_memory_lines(read_machine_memory()),
    ]
    problem = None
    try:
        info = _native.build_info()
        lines += [
            ("libraries", str(_native.library_directory())),
            ("built from", f"llama-cpp-python {info['llama_cpp_python']}, llama.cpp {info['llama_cpp_commit'][:9]}, patches {info['series'][:12]}"),
            ("build", f"{info['build_type']}, {info['compiler']}, {'portable' if info['portable'] else 'for the CPU that built it'}"),
            ("CUDA", str(info["cuda"])),
            ("HTTPS", "yes" if info.get("https", True) else "no: built without OpenSSL, so -hf and --model-url cannot fetch"),
        ]
        lines += [("device", text) for text in _backends()]
        if info["llama_cpp_python"] != _version("llama-cpp-python"):
            raise errors.BuildError(
                f"The libraries were built from llama-cpp-python {info['llama_cpp_python']}, but {_version('llama-cpp-python')} is installed: "
                f"pip install llama-cpp-python=={info['llama_cpp_python']} (Python part only, see docs/guide/building.md)."
            )
    except errors.BuildError as e:
        problem = e
    for name, text in lines:
        click.echo(f"{name:<16}{text}")
    if problem:
        click.echo(f"problem         {problem}", err=True)
        return 1
    return 0
