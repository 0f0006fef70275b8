"""How our programs end: one sentence for what a user can act on, and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from .errors import SparkError


def run_command(command: click.Command, name: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a click command as program `name` and exits: with the error's exit_code (1 for most) after a SparkError, 130 after
    Ctrl-C, else with what it returns."""
    try:
        code = command.main(args=list(argv) if argv is not None else None, prog_name=name, standalone_mode=False)
    except click.ClickException as e:
        e.show()
        code = e.exit_code
    except SparkError as e:
        print(f"{name}: error: {e}", file=sys.stderr)
        code = e.exit_code
    except click.Abort:
        code = 130
    sys.stdout.flush()
    sys.exit(code if isinstance(code, int) else 0)


def end_on_sigterm() -> None:
    """Makes SIGTERM and SIGHUP ordinary exits (143, 129), so that temporary files and child processes go. Main thread only."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
