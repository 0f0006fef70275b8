"""Help of commands that have commands."""

from __future__ import annotations

import click


class WholeSentences(click.Group):
    """A group that shows the first sentence of each command's help whole, however long it is."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.get_short_help_str(limit=1000)) for name, found in commands if found and not found.hidden])
