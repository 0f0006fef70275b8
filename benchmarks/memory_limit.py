"""A control group with a memory limit, version 1 or 2, for one process tree. Needs write access to the group's file system."""
from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryLimit:
    """Context manager: a new group with `n_bytes` of memory, page cache included, and no swap.

    Raises OSError with the path when the group cannot be made.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.version = 2 if (V2 / "cgroup.controllers").exists() else 1
        self.path = self._parent() / f"spark-bench-{os.getpid()}"

    def _parent(self) -> Path:
        if self.version == 1:
            return V1
        (group,) = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
        here = V2 / group.lstrip("/")
        # a group with processes cannot have children with limits, so the new one stands beside it
        return here if "memory" in (here / "cgroup.subtree_control").read_text().split() else here.parent

    def __enter__(self) -> MemoryLimit:
        self.path.mkdir()
        try:
            if self.version == 1:
                (self.path / "memory.limit_in_bytes").write_text(str(self.n_bytes))
                swap = self.path / "memory.memsw.limit_in_bytes"
                if swap.exists():
                    swap.write_text(str(self.n_bytes))
            else:
                (self.path / "memory.max").write_text(str(self.n_bytes))
                swap = self.path / "memory.swap.max"
                if swap.exists():
                    swap.write_text("0")
        except BaseException:
            self.path.rmdir()
            raise
        return self

    def enter(self) -> None:
        """Moves the calling process in; for preexec_fn."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int | None:
        """The most the group has used, page cache included; None where the kernel does not say."""
        path = self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        return int(path.read_text()) if path.exists() else None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for _ in range(50):  # the last process may still be leaving
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)
        self.path.rmdir()
