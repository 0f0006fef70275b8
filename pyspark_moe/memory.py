"""What this process may use of the machine's memory: physical RAM, control groups (v1 and v2), the lock limit."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

# v1 writes "no limit" as the largest multiple of a page below 2^63.
_V1_UNLIMITED = 2**60
_CAP_IPC_LOCK = 1 << 14


@dataclass(frozen=True)
class CgroupLimit:
    """The tightest memory limit over this process's control groups. Bytes."""

    version: int
    path: str
    limit_bytes: int
    available_bytes: int  # limit minus use, counting page cache as free


@dataclass(frozen=True)
class MachineMemory:
    """Bytes. `cgroup` is None where no control group limits this process."""

    physical_bytes: int
    physical_available_bytes: int
    cgroup: CgroupLimit | None = None
    memlock_bytes: int | None = None  # None: unlimited

    @property
    def total_bytes(self) -> int:
        """The most this process can ever use."""
        limit = self.cgroup.limit_bytes if self.cgroup else self.physical_bytes
        return min(self.physical_bytes, limit)

    @property
    def available_bytes(self) -> int:
        """What can be used now without pushing anybody out."""
        free = self.cgroup.available_bytes if self.cgroup else self.physical_available_bytes
        return max(0, min(self.physical_available_bytes, free))

    @property
    def limited_by(self) -> str:
        """Who sets `available_bytes`, for messages."""
        if self.cgroup and self.cgroup.available_bytes < self.physical_available_bytes:
            return f"control group {self.cgroup.path}"
        return "this machine"


def _read_int(path: Path) -> int | None:
    """The number in a kernel file; None when there is no file or it says "max"."""
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_table(path: Path) -> dict[str, int]:
    """Lines "name value [unit]" of a kernel file; empty when it cannot be read."""
    table: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return table
    for line in lines:
        fields = line.replace(":", " ").split()
        if len(fields) >= 2 and fields[1].isdigit():
            table[fields[0]] = int(fields[1])
    return table


def _ancestors(mount: Path, group: str) -> list[Path]:
    """Folders of a group and its parents up to the mount, those that exist.

    Inside a container the group's path may be that of the host, which is not mounted here; the mount itself is then the group.
    """
    parts = [p for p in group.split("/") if p not in ("", "..")]
    folders = [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
    return [f for f in folders if f.is_dir()]


def _limit_of(folder: Path, version: int, shown: str) -> CgroupLimit | None:
    if version == 2:
        limit, used = _read_int(folder / "memory.max"), _read_int(folder / "memory.current")
        cache_names = ("inactive_file", "active_file")
    else:
        limit, used = _read_int(folder / "memory.limit_in_bytes"), _read_int(folder / "memory.usage_in_bytes")
        cache_names = ("total_inactive_file", "total_active_file")
    if limit is None or limit >= _V1_UNLIMITED:
        return None
    stat = _read_table(folder / "memory.stat")
    cache = sum(stat.get(name, 0) for name in cache_names)
    available = limit - max(0, (used or 0) - cache)
    return CgroupLimit(version, shown, limit, max(0, available))


def _read_cgroup(root: Path) -> CgroupLimit | None:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found: list[CgroupLimit] = []
    for line in lines:
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        _, controllers, group = fields
        if controllers == "":
            version, mounts = 2, [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            version, mounts = 1, [root / "sys/fs/cgroup/memory"]
        else:
            continue
        for mount in mounts:
            for folder in _ancestors(mount, group):
                limit = _limit_of(folder, version, "/" + str(folder.relative_to(root)))
                if limit:
                    found.append(limit)
    return min(found, key=lambda c: c.available_bytes, default=None)


def _may_lock_anything(root: Path) -> bool:
    """Whether this process has CAP_IPC_LOCK, which the lock limit does not bind."""
    try:
        lines = (root / "proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) & _CAP_IPC_LOCK)


def read_machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Reads the machine's memory facts now. `root`: where /proc and /sys are (for tests). Raises OSError without /proc/meminfo."""
    info = _read_table(root / "proc/meminfo")
    if "MemTotal" not in info:
        raise OSError(f"'{root / 'proc/meminfo'}' does not say how much memory this machine has; is /proc mounted?")
    total = info["MemTotal"] * 1024
    available = info.get("MemAvailable", info.get("MemFree", 0)) * 1024
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MachineMemory(
        physical_bytes=total,
        physical_available_bytes=available,
        cgroup=_read_cgroup(root),
        memlock_bytes=None if soft == resource.RLIM_INFINITY or _may_lock_anything(root) else soft,
    )
