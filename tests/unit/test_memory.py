"""Control groups and /proc, from folders that look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspark_moe.memory import read_machine_memory

GIB = 1024**3


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree:         1000000 kB\nMemAvailable:    8388608 kB\n"}


def test_no_control_group(tmp_path: Path) -> None:
    memory = read_machine_memory(write(tmp_path, MEMINFO))
    assert memory.cgroup is None
    assert (memory.total_bytes, memory.available_bytes) == (16 * GIB, 8 * GIB)
    assert memory.limited_by == "this machine"


def test_version_2_takes_the_tightest_ancestor_and_counts_cache_as_free(tmp_path: Path) -> None:
    memory = read_machine_memory(
        write(
            tmp_path,
            {
                **MEMINFO,
                "proc/self/cgroup": "0::/user/job\n",
                "sys/fs/cgroup/user/job/memory.max": "max\n",
                "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/user/memory.stat": f"anon 100\ninactive_file {1 * GIB}\nactive_file {GIB // 2}\n",
            },
        )
    )
    assert memory.cgroup is not None and memory.cgroup.version == 2
    assert memory.total_bytes == 4 * GIB
    assert memory.available_bytes == 4 * GIB - (3 * GIB - GIB - GIB // 2)
    assert "user" in memory.limited_by


@pytest.mark.parametrize("group", ["/docker/abc", "/"])
def test_version_1_in_a_container_sees_its_limit_at_the_mount(tmp_path: Path, group: str) -> None:
    memory = read_machine_memory(
        write(
            tmp_path,
            {
                **MEMINFO,
                "proc/self/cgroup": f"11:cpu,cpuacct:{group}\n4:memory:{group}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1000\ntotal_active_file 0\n",
            },
        )
    )
    assert memory.cgroup is not None and memory.cgroup.version == 1
    assert (memory.total_bytes, memory.available_bytes) == (2 * GIB, GIB + 1000)


def test_version_1_without_a_limit_is_no_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert read_machine_memory(write(tmp_path, {**MEMINFO, **files})).cgroup is None


def test_a_group_over_its_limit_has_nothing_available(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    assert read_machine_memory(write(tmp_path, {**MEMINFO, **files})).available_bytes == 0


def test_no_proc_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is /proc mounted"):
        read_machine_memory(tmp_path)


@pytest.mark.parametrize(("capabilities", "is_bound"), [("0000000000000000", True), ("000001ffffffffff", False), ("0000000000004000", False)])
def test_the_lock_limit_does_not_bind_those_who_may_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: str, is_bound: bool
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 * 1024**2, 8 * 1024**2))
    memory = read_machine_memory(write(tmp_path, {**MEMINFO, "proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\n"}))
    assert memory.memlock_bytes == (8 * 1024**2 if is_bound else None)
