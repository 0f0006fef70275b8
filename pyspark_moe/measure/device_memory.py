"""What the NVIDIA driver says about the memory of GPUs and of processes on them."""

from __future__ import annotations

import subprocess

MIB = 2**20


def _smi(*args: str) -> list[list[str]]:
    """Rows of nvidia-smi; none where it fails or is missing."""
    try:
        done = subprocess.run(["nvidia-smi", *args, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()] if done.returncode == 0 else []


def parse_process_memory(rows: list[list[str]], pid: int) -> int | None:
    """Bytes of a process over all GPUs from rows of (pid, MiB); None when it is not there or has no number."""
    sizes = [row[1] for row in rows if len(row) == 2 and row[0] == str(pid)]
    return MIB * sum(map(int, sizes)) if sizes and all(size.isdigit() for size in sizes) else None


def memory_in_use() -> int | None:
    """Bytes in use on all GPUs together; None without a GPU."""
    sizes = [row[0] for row in _smi("--query-gpu=memory.used")]
    return MIB * sum(map(int, sizes)) if sizes and all(size.isdigit() for size in sizes) else None


def memory_free() -> int | None:
    """Bytes free on the GPU that has least of them free; None without a GPU."""
    sizes = [row[0] for row in _smi("--query-gpu=memory.free")]
    return MIB * min(map(int, sizes)) if sizes and all(size.isdigit() for size in sizes) else None


def process_memory(pid: int) -> int | None:
    """Bytes of device memory of a process as the driver counts them; None where it does not say (containers)."""
    return parse_process_memory(_smi("--query-compute-apps=pid,used_memory"), pid)


def process_or_growth(pid: int, before: int | None) -> tuple[int | None, str]:
    """(bytes, how they were measured). before: memory_in_use() when the process did not run yet; others must not change."""
    own = process_memory(pid)
    if own is not None:
        return own, "per process"
    now = memory_in_use()
    if now is None or before is None:
        return None, "none"
    return now - before, "growth of the GPU's use"
