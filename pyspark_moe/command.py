"""How our programs end: one sentence for what a user can act on, and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from .errors import SparkError


def run_command(command: click.Command, name: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a click command as program `name` and exits: 1 after a SparkError, 130 after Ctrl-C, else what it returns."""
    try:
        code = command.main(args=list(argv) if argv is not None else None, prog_name=name, standalone_mode=False)
    except click.ClickException as e:
        e.show()
        code = e.exit_code
    except SparkError as e:
        print(f"{name}: error: {e}", file=sys.stderr)
        code = 1
    except click.Abort:
        code = 130
    sys.stdout.flush()
    sys.exit(code if isinstance(code, int) else 0)
