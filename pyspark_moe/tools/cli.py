"""pyspark-moe: tools around the server."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from .. import __version__, errors
from .doctor import doctor
from .plan import plan


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="pyspark-moe")
def command() -> None:
    """Tools around dflash_server, which has its own --help."""


command.add_command(doctor)
command.add_command(plan)


def main() -> NoReturn:
    """Entry point of the `pyspark-moe` script."""
    try:
        code = command.main(prog_name="pyspark-moe", standalone_mode=False)
    except click.ClickException as e:
        e.show()
        code = e.exit_code
    except errors.SparkError as e:
        print(f"pyspark-moe: error: {e}", file=sys.stderr)
        code = 1
    except click.Abort:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
