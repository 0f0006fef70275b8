"""What this process uses of a GPU, from management libraries that tell much, little, or nothing."""
from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pyspark_moe import _native, gpu
from pyspark_moe.gpu import CONTEXT_BYTES, Gpu, used_bytes

GIB = 1024**3
CUDA0 = Gpu("CUDA0", "a card", "0000:3b:00.0", 16 * GIB, 12 * GIB)


class NVMLError(Exception):
    pass


class Nvml:
    """The part of pynvml that is used, for one card. None: it does not tell."""

    NVMLError = NVMLError

    def __init__(self, processes: list[Any] | None, used: list[int] | None, bus: str | bytes = b"00000000:3B:00.0") -> None:
        self.processes, self.used, self.bus = processes, used, bus

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        if not self.bus:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(busId=self.bus)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if self.used is None:
            raise NVMLError("not supported")
        return SimpleNamespace(used=self.used.pop(0))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        if self.processes is None:
            raise NVMLError("not supported")
        return self.processes


def process(pid: int, used: int | None) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gpu._used_at_start.cache_clear()
    monkeypatch.setattr(_native, "device_memory", lambda name: (16 * GIB, 9 * GIB))
    yield
    gpu._used_at_start.cache_clear()


def used(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> int:
    monkeypatch.setattr(gpu, "_nvml", lambda: nvml)
    gpu._used_at_start()
    return used_bytes(CUDA0)


def test_its_own_figure_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert used(monkeypatch, Nvml([process(1, GIB), process(os.getpid(), 5 * GIB)], [2 * GIB])) == 5 * GIB


@pytest.mark.parametrize("processes", [[], [process(1, GIB)], [process(os.getpid(), None)], None], ids=["none", "others", "unknown", "unsupported"])
def test_growth_of_the_card_stands_for_a_process_it_does_not_know(monkeypatch: pytest.MonkeyPatch, processes: list[Any] | None) -> None:
    assert used(monkeypatch, Nvml(processes, [2 * GIB, 6 * GIB])) == 4 * GIB


@pytest.mark.parametrize(
    "nvml", [None, Nvml(None, None), Nvml([], [GIB, GIB], "00000000:AF:00.0"), Nvml([], [GIB], "")], ids=["no library", "tells nothing", "another card", "lost card"]
)
def test_growth_of_cudas_figure_and_a_context_where_nobody_tells(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> None:
    assert used(monkeypatch, nvml) == 3 * GIB + CONTEXT_BYTES
