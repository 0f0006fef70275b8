"""The GPUs of this machine, and how much of their memory this process uses, as nvidia-smi would show it."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any


# What a CUDA context with ggml's kernels takes, from below (measured: docs/guide/cuda.md).
CONTEXT_BYTES = 400 * 1024**2


@dataclass(frozen=True)
class Gpu:
    """A GPU that can hold fast slots. Bytes, for all processes together, when it was read."""

    name: str  # ggml's, e.g. "CUDA0"
    description: str
    pci_bus_id: str
    total_bytes: int
    free_bytes: int


def _nvml() -> ModuleType | None:
    """NVIDIA's management library, initialised; None where there is none. What it would tell is then measured otherwise."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or one that refuses
        return None
    return pynvml


def _handles(nvml: ModuleType) -> dict[str, Any]:
    """NVML's handle of each GPU by bus id, of those that it may look at."""
    found = {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found[_bus(nvml.nvmlDeviceGetPciInfo(handle).busId)] = handle
    except nvml.NVMLError:  # a GPU that is lost, or not this user's
        pass
    return found


@functools.cache
def _used_at_start() -> dict[str, int]:
    """Bytes in use on each GPU by bus id, before this process used any; empty without NVML. Read once, so call it early."""
    nvml = _nvml()
    found = {}
    for bus, handle in _handles(nvml).items() if nvml else ():
        try:
            found[bus] = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except nvml.NVMLError:  # not every device tells
            continue
    return found


def _bus(value: str | bytes) -> str:
    """A PCI bus id in one spelling: NVML writes the domain with eight digits, CUDA with four."""
    text = value.decode() if isinstance(value, bytes) else value
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):x}:{rest}".lower()


def read_gpus(n_gpu_layers: int = -1) -> tuple[Gpu, ...]:
    """The GPUs that ggml sees, in its order; () for a build without CUDA, and when no layer goes there (0). Makes this
    process's context on each. Raises BuildError, InternalError."""
    from . import _native  # not at the top: this module is a leaf for everything that only describes a GPU

    if n_gpu_layers == 0 or not _native.build_info().get("cuda_enabled"):
        return ()
    _used_at_start()
    return tuple(Gpu(d.name, d.description, d.pci_bus_id, *_native.device_memory(d.name)) for d in _native.devices())


def used_bytes(gpu: Gpu) -> int:
    """Bytes of the GPU's memory that this process uses now.

    NVML tells it per process; where it does not know this process (containers, Windows' driver model), the growth of the GPU's
    use since start stands for it. Without NVML, or where it tells neither, that is the growth of CUDA's figure since `gpu` was
    read, and CONTEXT_BYTES, since there was a context by then.
    """
    bus, nvml = _bus(gpu.pci_bus_id), _nvml()
    handle = _handles(nvml).get(bus) if nvml else None
    if nvml is not None and handle is not None:
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            processes = []
        for process in processes:
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        if bus in _used_at_start():
            return max(0, int(nvml.nvmlDeviceGetMemoryInfo(handle).used) - _used_at_start()[bus])
    from . import _native

    return CONTEXT_BYTES + max(0, gpu.free_bytes - _native.device_memory(gpu.name)[1])
