"""What every benchmark shares: paired runs, medians, who measured what where, and the result file.

A benchmark compares arms. Rounds go A B A B ...: each round runs every arm once, so that a slow minute of the machine hits
all of them. The ratio of two arms is the median over rounds of the ratio within a round, with its quartiles.
"""
from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.append(str(ROOT))  # the package of this checkout where none is installed

from pyspark_moe.measure import paired  # noqa: E402
from pyspark_moe.measure.machine import machine, parse_gpus  # noqa: E402, F401
from pyspark_moe.measure.paired import Metrics, Paired, format_metrics, quartiles  # noqa: E402, F401


def run_paired(arms: Mapping[str, Callable[[], Metrics]], rounds: int, **options: Any) -> Paired:
    """paired.run_paired with a line for every round on stderr."""
    return paired.run_paired(arms, rounds, progress=progress, **options)


def end_on_sigterm() -> None:
    """Makes SIGTERM an ordinary exit, so that servers under measurement are stopped too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


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
