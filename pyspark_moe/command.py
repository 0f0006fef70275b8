"""How our programs end: one sentence for what a user can act on, and an exit code."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from .errors import SparkError
from .standard_streams import accept_every_character, flush_error, open_closed_streams, say

# a group that was named without a command; click before 8.2 has no class for it and prints the help itself
_HELP_ASKED = getattr(click.exceptions, "NoArgsIsHelpError", ())
_LOST = "The output cannot be written: {}."


def run_command(command: click.Command, name: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a click command as program `name` and exits: with the error's exit_code (1 for most) after a SparkError, 1 after a file
    or stdout that cannot be used, 130 after Ctrl-C, else with what it returns."""
    open_closed_streams()
    accept_every_character()
    lost: OSError | None = None
    try:
        code = command.main(args=list(argv) if argv is not None else None, prog_name=name, standalone_mode=False)
    except click.ClickException as e:
        if isinstance(e, _HELP_ASKED):
            say(e.format_message())
        else:
            if isinstance(e, click.UsageError) and e.ctx is not None:
                say(f"{e.ctx.get_usage()}\nTry '{e.ctx.command_path} --help' for help.\n")
            say(f"{name}: error: {e.format_message()}")
        code = e.exit_code
    except SparkError as e:
        say(f"{name}: error: {e}")
        code = e.exit_code
    except OSError as e:
        code = 1
        lost = flush_error(sys.stdout)
        if lost is None:  # an error without a file's name is one of writing to what is open
            say(f"{name}: error: '{e.filename}': {e.strerror}." if e.filename is not None else f"{name}: error: {_LOST.format(e.strerror or e)}")
    except click.Abort:
        code = 130
    lost = lost or flush_error(sys.stdout)
    if lost is not None:
        code = code or 1
        if lost.errno != errno.EPIPE:  # a reader who has seen enough, as in `| head`
            say(f"{name}: error: {_LOST.format(lost.strerror or lost)}")
    flush_error(sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def end_on_sigterm() -> None:
    """Makes SIGTERM and SIGHUP ordinary exits (143, 129), so that temporary files and child processes go. Main thread only."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
