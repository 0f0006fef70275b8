"""The budget is a promise: with --spark-ram G, expert weights never occupy more than G, also while a prompt is read.

Measured from outside, while the server works. Fast slots are anonymous memory that is left out of core dumps (flag "dd"
in smaps; no other memory of the process has it). Homes are a mapping of the model file. Pages of the file's experts that
are only in the page cache are counted too.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from harness import ONE_THREAD, Server
from synthetic import ModelFolder, models  # noqa: F401

Start = Callable[..., Server]
MIB = 2**20
PAGE = mmap.PAGESIZE
HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)$")


@dataclass(frozen=True)
class Resident:
    """Bytes in RAM now."""

    fast: int
    homes: int


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still: smaps is read mapping by mapping, and one layer's homes may go while the next one's come."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while any(Path(task, "stat").read_text().rsplit(")", 1)[1].split()[0] not in "Tt" for task in Path(f"/proc/{pid}/task").iterdir()):
            time.sleep(0.0005)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def resident(pid: int, model: Path) -> Resident:
    """What smaps says about the experts of `model` in process `pid`, at one moment."""
    with stopped(pid):
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    fast = homes = rss = 0
    path = ""
    for line in lines:
        if match := HEADER.match(line):
            path = match[1]
        elif line.startswith("Rss:"):
            rss = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:"):
            if path == str(model):
                homes += rss
            elif "dd" in line.split() and not path.startswith("/"):
                fast += rss
    return Resident(fast, homes)


def expert_ranges(model: Path) -> list[tuple[int, int]]:
    """(offset, bytes) of each expert tensor in the file."""
    return [(int(t.data_offset), int(t.n_bytes)) for t in gguf.GGUFReader(model).tensors if t.name.endswith("_exps.weight")]


def cached_expert_bytes(model: Path, ranges: list[tuple[int, int]]) -> int:
    """Bytes of the expert tensors that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    mapped = np.memmap(model, np.uint8, mode="r")
    pages = np.zeros(-(-mapped.size // PAGE), np.uint8)
    if libc.mincore(ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.size), ctypes.c_void_p(pages.ctypes.data)) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(PAGE * int((pages[begin // PAGE + 1 : (begin + size) // PAGE] & 1).sum()) for begin, size in ranges)


def drop_cache(model: Path) -> None:
    """Writes the file out and takes it out of the page cache."""
    fd = os.open(model, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class Watcher:
    """Samples a process until it is told to stop; keeps the largest values."""

    def __init__(self, pid: int, model: Path) -> None:
        self.pid, self.model = pid, model
        self.samples: list[Resident] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.samples.append(resident(self.pid, self.model))
            time.sleep(0.03)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        return max(s.fast + s.homes for s in self.samples)

    @property
    def peak_homes(self) -> int:
        return max(s.homes for s in self.samples)


@pytest.fixture(scope="module")
def big(models: ModelFolder) -> Path:
    """130 MiB of experts in 8 layers of 64. The whole file is in the page cache, as after a download, and on the disk:
    what is not yet on the disk cannot leave the cache, whatever a program asks for."""
    path = models.get("bench-small")
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.read_bytes()
    return path


PROMPT = "".join(f"def function_{i}(a, b, c):\n    return a * {i} + b\n\n" for i in range(30))  # 800 tokens, any expert


@pytest.mark.parametrize(("budget_mib", "policy"), [(48, "frequency"), (48, "chaos"), (96, "chaos"), (96, "static")])
def test_expert_memory_stays_within_the_budget(budget_mib: int, policy: str, big: Path, start: Start) -> None:
    budget = budget_mib * MIB
    server = start("-m", big, "--spark", "--spark-ram", budget_mib / 1024, "--spark-policy", policy, "-c", 4096, "-np", 1, *ONE_THREAD)

    with Watcher(server.pid, big) as decode:
        server.complete("import os", n=32, ignore_eos=True)
    decoded = server.get("/spark/stats")["total"]
    assert decoded["misses"] > 0, "nothing was missed, so nothing was tested"
    assert decode.peak <= budget, f"{decode.peak / MIB:.1f} MiB while tokens were generated"
    assert max(s.fast for s in decode.samples) <= decoded["fast_bytes"]
    print(f"decode {decode.peak / MIB:.1f} of {budget_mib} MiB in {len(decode.samples)} samples")

    with Watcher(server.pid, big) as prefill:
        server.complete(PROMPT, n=1)
    total = server.get("/spark/stats")["total"]
    assert total["bytes_home"] > decoded["bytes_home"] and prefill.peak_homes > 0, "nothing was read in place"
    assert prefill.peak <= budget, f"{prefill.peak / MIB:.1f} MiB while a prompt was read"
    print(f"prefill {prefill.peak / MIB:.1f} MiB in {len(prefill.samples)} samples")


def test_reads_into_slots_bypass_the_page_cache(big: Path, start: Start) -> None:
    """What is in a slot is not in the page cache as well."""
    ranges = expert_ranges(big)
    gc.collect()
    drop_cache(big)
    if cached_expert_bytes(big, ranges) > 0:
        pytest.skip("the file system of the temporary folder keeps its files in memory")
    server = start("-m", big, "--spark", "--spark-slots", 32, "-c", 4096, "-np", 1, *ONE_THREAD, "--no-warmup")
    server.complete("import", n=64, ignore_eos=True)  # one token at a time never needs more than 32 experts
    total = server.get("/spark/stats")["total"]
    assert total["bytes_read"] > 8 * MIB and total["bytes_home"] == 0
    assert cached_expert_bytes(big, ranges) < 2 * MIB


def test_the_measure_sees_an_unbounded_run(big: Path, start: Start) -> None:
    """The control: a plain mapping of the same model is seen to occupy more than the budgets above."""
    server = start("-m", big, "--no-spark", "--no-repack", "-c", 4096, "-np", 1, *ONE_THREAD)
    with Watcher(server.pid, big) as watcher:
        server.complete(PROMPT, n=1)
    assert watcher.peak > 96 * MIB


def test_all_resident_is_what_was_announced(big: Path, start: Start) -> None:
    server = start("-m", big, "--spark", "--spark-slots", 64, "-c", 2048, "-np", 1, *ONE_THREAD)
    server.complete("import os\n", n=16)
    total = server.get("/spark/stats")["total"]
    now = resident(server.pid, big)
    assert total["misses"] == 0
    assert 0.95 * total["fast_bytes"] <= now.fast <= total["fast_bytes"]
    assert now.homes < 8 * MIB
