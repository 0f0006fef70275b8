"""The GPUs of this machine, and how much of their memory this process uses, as nvidia-smi would show it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU that can hold fast slots. Bytes, for all processes together, when it was read."""

    name: str  # ggml's, e.g. "CUDA0"
    description: str
    pci_bus_id: str
    total_bytes: int
    free_bytes: int


def _nvml() -> ModuleType | None:
    """NVIDIA's management library, initialised; None where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or a driver that refuses: what it would tell is then measured otherwise
        return None
    return pynvml


@functools.cache
def _used_at_start() -> dict[str, int]:
    """Bytes in use on each GPU by bus id, before this process used any; empty without NVML. Read once, so call it early."""
    nvml = _nvml()
    if nvml is None:
        return {}
    used = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        used[_bus(nvml.nvmlDeviceGetPciInfo(handle).busId)] = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    return used


def _bus(value: str | bytes) -> str:
    """A PCI bus id in one spelling: NVML writes the domain with eight digits, CUDA with four."""
    text = value.decode() if isinstance(value, bytes) else value
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):x}:{rest}".lower()


def read_gpus() -> tuple[Gpu, ...]:
    """The GPUs that ggml sees, in its order; () for a build without CUDA. Makes this process's context on each. Raises
    BuildError, InternalError."""
    from . import _native  # not at the top: this module is a leaf for everything that only describes a GPU

    if not _native.build_info().get("cuda_enabled"):
        return ()
    _used_at_start()
    return tuple(Gpu(d.name, d.description, d.pci_bus_id, *_native.device_memory(d.name)) for d in _native.devices())


def used_bytes(gpu: Gpu, read_memory: Callable[[str], tuple[int, int]] | None = None) -> int:
    """Bytes of the GPU's memory that this process uses now.

    NVML tells it per process; where it does not know this process (containers), the growth of the GPU's use since start
    stands for it, and without NVML the growth of CUDA's figure since `gpu` was read, without the context.
    """
    nvml = _nvml()
    if nvml is not None:
        handle = _handle(nvml, gpu)
        if handle is not None:
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory:
                    return int(process.usedGpuMemory)
            now = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
            return max(0, now - _used_at_start().get(_bus(gpu.pci_bus_id), 0))
    if read_memory is None:
        from . import _native

        read_memory = _native.device_memory
    total, free = read_memory(gpu.name)
    return max(0, gpu.free_bytes - free)


def _handle(nvml: ModuleType, gpu: Gpu) -> Any:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if _bus(nvml.nvmlDeviceGetPciInfo(handle).busId) == _bus(gpu.pci_bus_id):
            return handle
    return None
