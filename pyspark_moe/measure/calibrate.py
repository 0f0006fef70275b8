"""A corpus becomes a routing profile: a child process reads it on the model, this one keeps what it counted."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, EngineError, MeasurementError, ProfileError
from ..model_profile import user_cache_folder
from ..routing_profile import SUFFIX, ProfileFile, RoutingProfile, add_counts, empty_profile, read_profile, write_profile
from .child import Child
from .limits import Limits
from .reading_child import ReadingJob, job_text

SOURCE = "corpus"  # what a profile calls the tokens of a calibration
READER = (sys.executable, "-m", "pyspark_moe.measure.reading_child")
_LEAST_SESSION_TOKENS = 512  # of a session, if it has them: its topic shows by then
_BYTES_PER_TOKEN = 4


def fair_share(sizes: Sequence[int], total: int) -> int:
    """The largest cap such that sum(min(size, cap)) <= total; the largest size when all of it fits. Pure."""
    left = total
    for i, size in enumerate(sorted(sizes)):
        n_larger = len(sizes) - i
        if size * n_larger > left:
            return left // n_larger
        left -= size
    return max(sizes, default=0)


def session_tokens(session_bytes: Sequence[int], tokens: int) -> int:
    """Tokens to read of one session at most, so that `tokens` of a corpus come from as many sessions as possible. Sizes are
    estimated from bytes of text."""
    estimates = [size // _BYTES_PER_TOKEN + 1 for size in session_bytes]
    if sum(estimates) <= tokens:
        return tokens  # all of it fits, also where the estimate is too low
    return min(tokens, max(_LEAST_SESSION_TOKENS, fair_share(estimates, tokens)))


@dataclass
class Counted:
    """What was read so far. counts: block -> uses [n_expert], those of `tokens` tokens. n_plain: pieces of a conversation that
    the model's template refused, read as plain text. ended: why it stopped, "" before that."""

    tokens: int = 0
    n_pieces: int = 0
    n_plain: int = 0
    seconds: float | None = None
    ended: str = ""
    counts: dict[int, np.ndarray] = field(default_factory=dict)
    why_residency: str = ""


def read_in_child(
    job: ReadingJob,
    limits: Limits,
    counted: Counted,
    *,
    progress: Callable[[float], None] = lambda share: None,
    loaded: Callable[[str], None] = lambda why: None,
    command: Sequence[str] = READER,
) -> None:
    """Has a child do the job and fills `counted` while it does, so that it has the last report when this raises:
    StalledError, EngineError, MeasurementError with the child's own sentence, KeyboardInterrupt."""
    name = "the reading process"
    with Child(name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.process.stdin is not None
        try:
            child.process.stdin.write(job_text(job))
            child.process.stdin.flush()
        except BrokenPipeError:
            raise child.died("starting") from None
        for message in _messages(child, limits, lambda: "reading" if counted.why_residency else "loading the model"):
            if "error" in message:
                raise MeasurementError(str(message["error"]))
            if "loaded" in message:
                counted.why_residency = str(message["loaded"])
                loaded(counted.why_residency)
                continue
            if "counts" in message:
                counted.counts = {int(layer): np.array(uses, dtype=np.float64) for layer, uses in message["counts"].items()}
                counted.tokens, counted.n_pieces, counted.n_plain = message["tokens"], message["pieces"], message["plain"]
            progress(message["share"])
            if "ended" in message:
                counted.ended, counted.seconds = message["ended"], message["seconds"]
                return


def _messages(child: Child, limits: Limits, doing: Callable[[], str]) -> Iterator[dict[str, Any]]:
    """What the child reports, as it comes. Raises StalledError, EngineError when it ends or says something else."""
    assert child.process.stdout is not None
    descriptor = child.process.stdout.fileno()
    buffer = b""
    last_sign, log_size = limits.clock(), 0
    while True:
        wait_s = limits.step_s(last_sign)
        if wait_s <= 0:
            raise limits.stalled(f"{child.name}, {doing()},")
        ready, _, _ = select.select([descriptor], [], [], min(wait_s, 1.0))
        if child.log_size != log_size:
            last_sign, log_size = limits.clock(), child.log_size
        if not ready:
            continue
        data = os.read(descriptor, 1 << 20)
        if not data:
            raise child.died(doing())
        last_sign = limits.clock()
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                raise EngineError(f"{child.name} reported {line[:200]!r}, which is none of its reports.")
            yield message


def check_place(file: ProfileFile, *, add: bool, replace: bool) -> RoutingProfile | None:
    """The profile of this model that is at the place already. Raises ConfigError unless it may be changed as asked, and for
    one of another model or one that is damaged in any case: those are nobody's to replace by the way."""
    if add and replace:
        raise ConfigError("--add keeps what the profile has, --force replaces it: give one of them.")
    try:
        found = read_profile(file.path)
        if found is not None and (found.fingerprint != file.fingerprint or found.shape != dict(file.shape)):
            raise ProfileError("it is of another model, or of another version of this one")
    except ProfileError as e:
        raise ConfigError(
            f"'{file.path}' is in the way and is left as it is: {e}. Name another file with --out, or set it aside with `pyspark-moe profile reset`."
        ) from None
    except OSError as e:
        raise ConfigError(f"'{file.path}' cannot be read: {e.strerror or e}. Name another file with --out.") from None
    if found is not None and not (add or replace):
        raise ConfigError(f"'{file.path}' exists: --add adds to its counts, --force replaces it, or name another file with --out.")
    folder = Path(os.path.realpath(file.path)).parent
    is_default_folder = folder.is_relative_to(os.path.realpath(user_cache_folder()))  # is made when it is written
    if not is_default_folder and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"'{file.path}' cannot be written: '{folder}' {'is not writable' if folder.is_dir() else 'is no folder'}.")
    return found


def partial_path(path: Path) -> Path:
    """Where a calibration that was ended early leaves its profile, so that no server takes it for a whole one."""
    return path.with_name(f"{path.name.removesuffix(SUFFIX)}.partial{SUFFIX}")


def make_profile(file: ProfileFile, counted: Counted) -> RoutingProfile:
    """A profile of what was counted and nothing else."""
    return add_counts(empty_profile(file.fingerprint, file.shape), counted.counts, counted.tokens, SOURCE)


def save_profile(file: ProfileFile, counted: Counted, *, add: bool) -> RoutingProfile:
    """Adds to the profile at the place, or makes or replaces it. Raises ProfileWriteError, ProfileError."""
    if add:
        return file.add(counted.counts, counted.tokens, SOURCE)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    return write_profile(file.path, make_profile(file, counted))
