"""A child process that cannot outlive what it is measured for: its own process group, its own log, always ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any

from ..errors import ConfigError, EngineError

_PR_SET_PDEATHSIG = 1
_GRACE_S = 10.0
_libc = ctypes.CDLL(None, use_errno=True)  # before any fork: nothing may be loaded between fork and exec


def _die_with_parent() -> None:
    """In the child: SIGKILL when the parent is gone, however it went."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Child:
    """A running program; `with` ends it. Its output goes to a log that has no name, so nothing is left of it in any case.

    name     for messages: "the all-resident server"
    command  program and arguments
    **popen  of subprocess.Popen, stdin= for example

    It leads a process group of its own: Ctrl-C reaches it through us only, and what it started ends with it. Start it from
    the main thread, since the kernel ends it with the thread that made it. Raises ConfigError for a program that cannot be started.
    """

    def __init__(self, name: str, command: Sequence[str], **popen: Any) -> None:
        self.name = name
        self._log: IO[bytes] = tempfile.TemporaryFile(prefix="pyspark-moe-")
        popen = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": self._log, **popen}
        try:
            self.process = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_parent, **popen)
        except OSError as e:
            self._log.close()
            raise ConfigError(f"'{command[0]}' cannot be started as {name}: {e.strerror or e}.") from None

    @property
    def log_size(self) -> int:
        """Bytes logged so far: it growing is a sign of life."""
        return os.fstat(self._log.fileno()).st_size

    def log_tail(self, n_bytes: int = 2000) -> str:
        """The last lines that it logged, at most n_bytes; a first line that is cut is left out."""
        size = self.log_size
        text = os.pread(self._log.fileno(), n_bytes, max(0, size - n_bytes)).decode(errors="replace")
        return (text if size <= n_bytes else text.partition("\n")[2]).strip()

    def died(self, doing: str) -> EngineError:
        """The error for a child that is at its end; says how it ended and what it logged last."""
        try:
            code = self.process.wait(5)  # closing its pipes comes before its end
        except subprocess.TimeoutExpired:
            how = "closed its output"
        else:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        tail = self.log_tail()
        return EngineError(f"{self.name} {how} while it was {doing}." + (f" Its last lines:\n{tail}" if tail else " It logged nothing."))

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Ends it and all that it started: asks, waits `grace_s` seconds, then kills. Again is allowed."""
        if self._log.closed:
            return
        try:
            if self.process.poll() is None and grace_s > 0:
                self._signal(signal.SIGTERM)
                try:
                    self.process.wait(grace_s)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            self._signal(signal.SIGKILL)
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()
            self._log.close()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # none of the group is left, or only what has other rights now

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        # after a failure nothing that it would still tell is worth waiting for
        self.close(_GRACE_S if kind is None else 2.0)
