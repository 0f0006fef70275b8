"""What the GPU says: memory of a process, and the bandwidth of copies from pinned RAM.

    python cuda_device.py [LIBCUDART]     prints {"copy size in bytes": bytes per second}

The bandwidth is measured in a process of its own, so that no context stays on the GPU.
"""
from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
from pathlib import Path

import common  # noqa: F401  finds the package
from pyspark_moe.measure.device_memory import MIB, memory_in_use, parse_process_memory, process_memory, process_or_growth

__all__ = ["bandwidth", "memory_in_use", "parse_process_memory", "process_memory", "process_or_growth"]

CUDART = ("libcudart.so.13", "/usr/local/cuda/lib64/libcudart.so.13", "libcudart.so.12", "/usr/local/cuda/lib64/libcudart.so.12", "libcudart.so")
COPY_SIZES = (256 * MIB, 2 * MIB, 512 * 1024)
HOST_TO_DEVICE = 1


def bandwidth(library: str | None = None, timeout_s: float = 60) -> dict[str, float] | str:
    """Bytes/s of copies from pinned RAM to the GPU by size; a sentence where they cannot be measured."""
    command = [sys.executable, str(Path(__file__).resolve()), *([library] if library else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"the measurement took longer than {timeout_s:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return json.loads(done.stdout)


def _load(library: str | None) -> ctypes.CDLL:
    reasons = []
    for name in (library,) if library else CUDART:
        try:
            return ctypes.CDLL(name)
        except OSError as e:
            reasons.append(str(e))
    raise SystemExit(f"libcudart cannot be loaded: {reasons[0]}")


def _measure(cuda: ctypes.CDLL, copies: int = 9) -> dict[str, float]:
    def call(name: str, *args: object) -> None:
        status = getattr(cuda, name)(*args)
        if status:
            cuda.cudaGetErrorString.restype = ctypes.c_char_p
            raise SystemExit(f"{name}: {cuda.cudaGetErrorString(status).decode()}")

    size_t, pointer = ctypes.c_size_t, ctypes.c_void_p
    host, device, stream, begin, end = pointer(), pointer(), pointer(), pointer(), pointer()
    call("cudaMallocHost", ctypes.byref(host), size_t(max(COPY_SIZES)))
    ctypes.memset(host, 1, max(COPY_SIZES))
    call("cudaMalloc", ctypes.byref(device), size_t(max(COPY_SIZES)))
    call("cudaStreamCreate", ctypes.byref(stream))
    call("cudaEventCreate", ctypes.byref(begin))
    call("cudaEventCreate", ctypes.byref(end))
    found = {}
    for size in COPY_SIZES:
        rates = []
        n = 1 if size >= 64 * MIB else 64  # small ones back to back, as misses come
        for number in range(-2, copies):
            call("cudaEventRecord", begin, stream)
            for i in range(n):
                offset = i * size % max(COPY_SIZES)
                call("cudaMemcpyAsync", pointer(device.value + offset), pointer(host.value + offset), size_t(size), ctypes.c_int(HOST_TO_DEVICE), stream)
            call("cudaEventRecord", end, stream)
            call("cudaEventSynchronize", end)
            ms = ctypes.c_float()
            call("cudaEventElapsedTime", ctypes.byref(ms), begin, end)
            if number >= 0:
                rates.append(n * size / (ms.value / 1000))
        found[str(size)] = statistics.median(rates)
    return found


if __name__ == "__main__":
    print(json.dumps(_measure(_load(sys.argv[1] if len(sys.argv) > 1 else None))))
