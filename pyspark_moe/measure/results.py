"""The result of a measurement as JSON: written as a whole after every step, marked partial until the last one."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..errors import ConfigError, EngineError, SparkError, StalledError
from ..shared_file import check_own_result, replace_file
from .machine import machine


class ResultFile:
    """What a measurement has found so far, and the file that says it. `with` marks how it ended.

    tool      "calibrate", "validate" or "bench"
    path      where it is written, None: nowhere; an earlier result that is there already is replaced, and nothing else is
    settings  everything that must be equal for two results to be comparable

    Raises ConfigError at once for a place that cannot be written, so that nothing is measured for it.
    """

    def __init__(self, tool: str, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.value: dict[str, Any] = {
            "tool": tool,
            "version": __version__,
            "partial": True,
            "ended": "still running",
            "started": _now(),
            "updated": "",
            "machine": machine(),
            "load_average": {"before": os.getloadavg()[0]},
            "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
            "results": {},
        }
        if path is not None:
            self._check_place(path)
        self.write()

    @staticmethod
    def _check_place(path: Path) -> None:
        try:
            check_own_result(path, "tool")
        except ValueError as e:
            raise ConfigError(f"--json {path} cannot be written: {e}. Name another file.") from None
        except OSError as e:
            raise ConfigError(f"--json {path} cannot be written: {e.strerror or e}.") from None

    @property
    def results(self) -> dict[str, Any]:
        """To be filled; write() saves it."""
        return self.value["results"]

    def write(self) -> None:
        """Replaces the file. Raises ConfigError; the file is the old one then."""
        self.value["updated"] = _now()
        self.value["load_average"]["after"] = os.getloadavg()[0]
        if self.path is None:
            return
        data = json.dumps(self.value, indent=1, allow_nan=False).encode() + b"\n"
        try:
            replace_file(self.path, data, is_locked=False)
        except OSError as e:
            raise ConfigError(f"--json {self.path} cannot be written: {e.strerror or e}.") from None

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.value["partial"] = kind is not None
        self.value["ended"] = _how(error)
        try:
            self.write()
        except ConfigError as e:
            if kind is None:
                raise
            click.echo(str(e), err=True)  # the first failure is what is reported
            return
        if kind is not None and self.path is not None and self.results:
            print(f"What was found until then is in {self.path}, marked as partial.", file=sys.stderr)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _how(error: BaseException | None) -> str:
    if error is None:
        return "complete"
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return "interrupted"
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return f"interrupted by {signal.Signals(error.code - 128).name}"  # see command.end_on_sigterm
    kind = "time-out" if isinstance(error, StalledError) else "engine died" if isinstance(error, EngineError) else "failed"
    return f"{kind}: {error}" if isinstance(error, SparkError) else f"{kind}: {type(error).__name__}"
