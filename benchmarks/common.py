"""What every benchmark shares: paired runs, medians, who measured what where, and the result file.

A benchmark compares arms. Rounds go A B A B ...: each round runs every arm once, so that a slow minute of the machine hits
all of them. The ratio of two arms is the median over rounds of the ratio within a round, with its quartiles.
"""
from __future__ import annotations

import datetime
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
Metrics = Mapping[str, float]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile)."""
    if len(values) < 2:
        return (values[0],) * 3
    q = statistics.quantiles(values, n=4, method="inclusive")
    return q[0], statistics.median(values), q[2]


@dataclass
class Paired:
    """Rounds of several arms. rounds[i][arm][metric] is a number; higher or lower is better as the metric's name says."""

    arms: tuple[str, ...]
    rounds: list[dict[str, dict[str, float]]] = field(default_factory=list)

    def median(self, arm: str, metric: str) -> float:
        return statistics.median(r[arm][metric] for r in self.rounds)

    def ratio(self, arm: str, base: str, metric: str) -> dict[str, float]:
        """arm / base within rounds: median and quartiles."""
        low, middle, high = quartiles([r[arm][metric] / r[base][metric] for r in self.rounds])
        return {"median": middle, "lower_quartile": low, "upper_quartile": high}

    def summary(self, base: str) -> dict[str, Any]:
        """Medians of every arm and ratios to `base`."""
        metrics = list(self.rounds[0][base])
        return {
            "rounds": len(self.rounds),
            "base": base,
            "medians": {arm: {m: self.median(arm, m) for m in metrics} for arm in self.arms},
            "ratios": {arm: {m: self.ratio(arm, base, m) for m in metrics} for arm in self.arms if arm != base},
        }


def run_paired(
    arms: Mapping[str, Callable[[], Metrics]],
    rounds: int,
    *,
    warmup: int = 1,
    pause_s: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
    into: Paired | None = None,
) -> Paired:
    """Runs `rounds` rounds after `warmup` that are thrown away. The order within a round alternates, so that no arm always
    comes first. stop: asked before every round, true ends them early. into: collects here, so that a round that fails
    loses itself only."""
    result = Paired(tuple(arms)) if into is None else into
    for number in range(-warmup, rounds):
        if stop():
            progress(f"stopped before round {number + 1} of {rounds}")
            break
        names = list(arms) if number % 2 == 0 else list(reversed(arms))
        measured = {}
        for name in names:
            measured[name] = dict(arms[name]())
            time.sleep(pause_s)
        if number >= 0:
            result.rounds.append({name: measured[name] for name in arms})
        progress(f"round {number + 1}/{rounds}: " + ", ".join(f"{n} {format_metrics(measured[n])}" for n in arms))
    return result


def end_on_sigterm() -> None:
    """Makes SIGTERM an ordinary exit, so that servers under measurement are stopped too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def format_metrics(metrics: Metrics) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in metrics.items())


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- where and what

def _command(*args: str) -> str:
    """What a command prints; "" when it fails or is not installed."""
    try:
        done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """Short commit of this checkout; "+changes" when tracked files differ from it."""
    name = _command("git", "rev-parse", "--short=10", "HEAD") or "unknown"
    return name + ("+changes" if _command("git", "status", "--porcelain", "--untracked-files=no") else "")


def _cpu() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
    flags = re.search(r"^flags\s*:\s*(.*)$", text, re.M)
    wanted = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
    have = set(flags.group(1).split()) if flags else set()
    return {"name": name.group(1).strip() if name else platform.processor(), "cores": os.cpu_count(), "flags": [f for f in wanted if f in have]}


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
    query = "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    return parse_gpus(_command("nvidia-smi", query, "--format=csv,noheader,nounits"))


def machine() -> dict[str, Any]:
    """The properties that make two results comparable; "gpus" only where there are some."""
    gpus = _gpus()
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    return {
        "cpu": _cpu(),
        "memory_gib": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "system": platform.system(),
        **({"gpus": gpus} if gpus else {}),
    }


def machine_slug(facts: Mapping[str, Any]) -> str:
    """Folder name for a machine's results."""

    def words(text: str) -> str:
        return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")

    slug = f"{words(str(facts['cpu']['name']))}-{facts['cpu']['cores']}c-{round(facts['memory_gib'])}g"
    gpus = facts.get("gpus", [])
    return slug + (f"-{len(gpus)}x-{words(gpus[0]['name'])}" if gpus else "")


def load_average() -> float:
    """Runnable processes over the last minute: a busy machine is no place to measure."""
    return os.getloadavg()[0]


def save(
    name: str,
    *,
    method: str,
    settings: Mapping[str, Any],
    results: Mapping[str, Any],
    rounds: Mapping[str, Paired],
    load_before: float,
    folder: Path | None = None,
    commit_text: str | None = None,
    started: datetime.datetime | None = None,
) -> Path:
    """Writes results/<machine>/<date>-<commit>-<name>.json, or the same below `folder`. settings: everything that must be
    equal for a comparison. commit_text: for a copy of the checkout without git. started: what the file name says; a second
    save with the same one replaces the first."""
    facts = machine()
    now = datetime.datetime.now(datetime.timezone.utc)
    version = commit_text or commit()
    folder = folder or RESULTS / machine_slug(facts)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / re.sub(r"[^\w.-]", "-", f"{started or now:%Y%m%d-%H%M%S}-{version}-{name}.json")
    value = {
        "benchmark": name,
        "method": method,
        "time": now.isoformat(timespec="seconds"),
        "commit": version,
        "command": " ".join(["python", *[_relative(arg) for arg in sys.argv]]),
        "machine": facts,
        "load_average": {"before": load_before, "after": load_average()},
        "settings": {key: _relative(v) for key, v in settings.items()},
        "results": results,
        "rounds": {key: paired.rounds for key, paired in rounds.items()},
    }
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value, indent=1) + "\n")
    unfinished.replace(path)
    progress(f"wrote {_relative(path.resolve())}")
    return path


def _relative(value: Any) -> Any:
    """Paths of one machine stay out of results: inside the checkout relative to it, outside the name alone."""
    if isinstance(value, (list, tuple)):
        return [_relative(v) for v in value]
    if not isinstance(value, (str, Path)) or "/" not in str(value):
        return value
    path = Path(str(value))
    if not path.is_absolute():
        return str(value).replace(f"{ROOT}/", "")
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
