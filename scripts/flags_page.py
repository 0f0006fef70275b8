#!/usr/bin/env python3
"""Writes docs/guide/flags.md and the table of flags in README.md from the command itself; --check only compares.

    .venv/bin/python scripts/flags_page.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pyspark_moe.server.cli import EPILOG, command  # noqa: E402

PAGE = ROOT / "docs/guide/flags.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- flags:begin (scripts/flags_page.py) -->", "<!-- flags:end -->"


def records() -> list[tuple[str, str, str]]:
    """(group, flag, help) of every option of dflash_server, in the order of --help."""
    ctx = click.Context(command, info_name="dflash_server")
    result = []
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
        if record:
            result.append((getattr(param, "group", "This program"), record[0], " ".join(record[1].split())))
    return result


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| flag | what it does |", "|---|---|"]
    lines += [f"| `{cell(flag)}` | {cell(text)} |" for _, flag, text in rows]
    return "\n".join(lines)


def page() -> str:
    rows = records()
    parts = [
        "# Flags of dflash_server\n",
        "Generated from the command by `scripts/flags_page.py`; a test compares them.\n",
        "    dflash_server [MODEL] [OPTIONS] [LLAMA-SERVER OPTIONS]\n",
    ]
    for group in dict.fromkeys(group for group, _, _ in rows):
        parts.append(f"## {group}\n\n{table([row for row in rows if row[0] == group])}\n")
    parts.append(f"## llama-server's flags\n\n{EPILOG}\n")
    return "\n".join(parts)


def readme(text: str) -> str:
    """README.md with its table replaced. Raises SystemExit without the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks the markers {BEGIN} and {END}: put them where the table of flags belongs.")
    return f"{before}{BEGIN}\n{table(records())}\n{END}{after}"


def main() -> int:
    wanted = {PAGE: page(), README: readme(README.read_text(encoding="utf-8"))}
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} differs from the flags of the command: run scripts/flags_page.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
