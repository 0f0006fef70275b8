"""dflash_server on a GPU: the same text as llama-server, and a budget that is kept."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import DRAFT, TARGET, Server, run_server
from synthetic import ModelFolder, models  # noqa: F401

pytestmark = pytest.mark.cuda

GIB = 1024**3
PROMPTS = ("def quicksort(values):\n", "The kernel reads the page from disk when", "class Cache:\n    def __init__(self")


def texts(server: Server, n: int = 48) -> list[str]:
    """One after the other, then a long prompt, then all at once."""
    result = [server.complete(p, n) for p in PROMPTS]
    result.append(server.complete(" ".join(PROMPTS) * 30, 16))
    at_once: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i, p=p: at_once.update({i: server.complete(p, n)})) for i, p in enumerate(PROMPTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result + [at_once[i] for i in range(len(PROMPTS))]


class Peak:
    """The most device memory that was in use while sampled, over what was in use before, bytes."""

    def __init__(self) -> None:
        pynvml = pytest.importorskip("pynvml")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._used = lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        self._before = self._used()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.n_bytes = 0

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.n_bytes = max(self.n_bytes, self._used() - self._before)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def serve(tmp_path: Path, *args: object, model: Path = TARGET) -> Iterator[Server]:
    with Server(["-m", model, "-c", 4096, "-np", 4, "--fit", "off", "-ngl", 99, "--no-cache-prompt", *args], tmp_path / "log.txt") as server:
        yield server


@pytest.mark.parametrize("flags", [("--spark-slots", 8), ("--spark-slots", 0), ("--spark-slots", 1000), ("--spark",),
                                   ("--spark-slots", 8, "--spark-policy", "chaos")])  # fmt: skip
def test_same_text(flags: tuple[object, ...], tmp_path: Path) -> None:
    with serve(tmp_path, "--no-spark") as server:
        expected = texts(server)
    (tmp_path / "log.txt").unlink()
    with serve(tmp_path, *flags) as server:
        assert texts(server) == expected
        props = server.get("/props")["spark"]
        assert props["active"] and props["gpu"]["name"] == "CUDA0"
        total = server.get("/spark/stats")["total"]
        if flags == ("--spark-slots", 8):
            assert total["hits"] > 0 and total["misses"] > 0


@pytest.fixture(scope="module")
def big(models: ModelFolder) -> Path:
    """About 1.2 GiB of experts."""
    return models.get("bench-small", n_layer=24, n_ff_exp=512)


def test_the_budget_is_kept_and_used(big: Path, tmp_path: Path) -> None:
    """Peak device memory over start, long prompts and parallel decoding, for budgets between the least and all."""
    done = run_server(["-m", big, "-c", 4096, "-np", 4, "-ngl", 99, "--spark-vram", "0.2"])
    assert done.returncode == 1
    match = re.search(r"--spark-vram 0.2 is too small: .*Give at least --spark-vram ([\d.]+)", done.stderr)
    assert match, done.stderr
    # before loading the sum is an estimate from below; what is measured is not
    done = run_server(["-m", big, "-c", 4096, "-np", 4, "-ngl", 99, "--spark-vram", match.group(1)])
    assert done.returncode == 1
    match = re.search(r"measured .*Give at least --spark-vram ([\d.]+)", done.stderr)
    assert match, done.stderr
    least = float(match.group(1)) + 0.02
    for budget in (least, least + 0.3, least + 0.5, least + 2.0):
        with Peak() as peak:
            with serve(tmp_path, "--spark-vram", f"{budget:.3f}", model=big) as server:
                texts(server, 32)
                props = server.get("/props")["spark"]
        limit = int(budget * GIB)
        assert peak.n_bytes <= limit, f"{peak.n_bytes / GIB:.3f} GiB used of --spark-vram {budget:.3f}"
        assert props["bytes"]["need"] <= limit
        if budget < least + 0.6:
            assert peak.n_bytes > 0.85 * limit, f"only {peak.n_bytes / GIB:.3f} GiB used of --spark-vram {budget:.3f}"
        (tmp_path / "log.txt").unlink()


def test_the_budget_covers_a_draft_and_a_quantised_cache(tmp_path: Path) -> None:
    with Peak() as peak:
        with serve(tmp_path, "--spark-vram", "1.5", "--draft", DRAFT, "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on") as server:
            texts(server, 32)
    assert peak.n_bytes <= 1.5 * GIB


def test_a_budget_below_what_loading_needs_is_refused_with_the_sums(big: Path, tmp_path: Path) -> None:
    done = run_server(["-m", big, "-c", 65536, "-ngl", 99, "--spark-vram", "1.0"])
    assert done.returncode == 1
    assert "--spark-vram 1 is too small" in done.stderr and "Give at least --spark-vram" in done.stderr


def test_sleep_and_wake(tmp_path: Path) -> None:
    """The model is freed after a second of idleness and loaded again by the next request, in the same budget."""
    with serve(tmp_path, "--spark-vram", "1.5", "--sleep-idle-seconds", 1) as server:
        first = server.complete(PROMPTS[0], 24)
        threading.Event().wait(3)
        assert server.complete(PROMPTS[0], 24) == first


def test_layers_off_the_gpu_keep_experts_in_ram(tmp_path: Path) -> None:
    with Server(["-m", TARGET, "-c", 2048, "-ngl", 0, "--spark-slots", 8], tmp_path / "log.txt") as server:
        server.complete(PROMPTS[0], 8)
        assert server.get("/props")["spark"]["gpu"] is None
