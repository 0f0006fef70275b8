"""pyspark-moe: tools around the server."""

from __future__ import annotations

from typing import NoReturn

import click

from .. import __version__
from ..command import run_command
from .bench import bench
from .calibrate import calibrate
from .doctor import doctor
from .extract import extract
from .help_text import WholeSentences
from .plan import plan
from .pregate import pregate
from .profile import profile
from .trace import trace
from .quantize_draft import quantize_draft
from .validate import validate


@click.group(cls=WholeSentences, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="pyspark-moe")
def command() -> None:
    """Tools around dflash_server, which has its own --help."""


command.add_command(bench)
command.add_command(calibrate)
command.add_command(doctor)
command.add_command(extract)
command.add_command(plan)
command.add_command(pregate)
command.add_command(profile)
command.add_command(trace)
command.add_command(quantize_draft)
command.add_command(validate)


def main() -> NoReturn:
    """Entry point of the `pyspark-moe` script."""
    run_command(command, "pyspark-moe")


if __name__ == "__main__":
    main()
