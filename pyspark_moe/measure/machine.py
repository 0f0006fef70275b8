"""What a machine is: the properties that make two measurements comparable."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

_SMI_FIELDS = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
_CPU_FLAGS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")


def machine() -> dict[str, Any]:
    """CPU, memory, kernel; "gpus" only where there are some."""
    gpus = _gpus()
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    return {
        "cpu": _cpu(),
        "memory_gib": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "system": platform.system(),
        **({"gpus": gpus} if gpus else {}),
    }


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """What `nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max` says, a GPU a line."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5:
            name, driver, mib, *link = fields
            generation, width = (int(value) if value.isdigit() else None for value in link)
            gpus.append({"name": name, "driver": driver, "memory_gib": round(int(mib) / 1024, 1) if mib.isdigit() else None,
                         "pcie_generation": generation, "pcie_width": width})  # fmt: skip
    return gpus


def _gpus() -> list[dict[str, Any]]:
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def _cpu() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
    flags = re.search(r"^flags\s*:\s*(.*)$", text, re.M)
    have = set(flags.group(1).split()) if flags else set()
    return {"name": name.group(1).strip() if name else platform.processor(), "cores": os.cpu_count(), "flags": [f for f in _CPU_FLAGS if f in have]}
