"""How a command ends when what it prints goes nowhere: a sentence where one can be read, an exit code, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import sys, click
from pyspark_moe.command import run_command
@click.command()
@click.argument("what")
def command(what):
    if what == "print": click.echo("x\\u00e9" * 20)
    if what == "surrogate": click.echo("\\udcff")
    if what == "open": open("/nowhere/at all")
    if what == "fail": raise click.ClickException("no")
    if what == "write":
        with open("kept", "w") as f:
            print("a line of a log", file=sys.stderr, flush=True)
            import os; os.write(1, b"another"); f.write("profile")
run_command(command, "some-program")
"""


def run(what: str, redirections: str = "", cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    script = f'exec "$0" -c "$1" {what} {redirections}'
    return subprocess.run(["sh", "-c", script, sys.executable, COMMAND], capture_output=True, text=True, timeout=60, cwd=cwd, env=os.environ | env)


@pytest.mark.parametrize(("what", "code"), [("print", 0), ("fail", 1), ("open", 1)])
@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_closed_and_full_streams_change_no_exit_code(what: str, code: int, redirections: str) -> None:
    done = run(what, redirections)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_output_that_is_lost_is_an_error() -> None:
    done = run("print", ">/dev/full")
    assert (done.returncode, done.stderr) == (1, "some-program: error: The output cannot be written: No space left on device.\n")


def test_a_reader_who_has_seen_enough() -> None:
    done = run("print", "| true")
    assert done.stderr == ""


def test_every_error_begins_with_the_program() -> None:
    assert run("fail").stderr == "some-program: error: no\n"
    assert run("open extra").stderr.splitlines()[-1].startswith("some-program: error: Got unexpected extra argument")


@pytest.mark.parametrize("arguments", [[], ["profile"]])
def test_a_group_shows_its_commands_in_whole_sentences(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "pyspark_moe.tools.cli", *arguments, "--help"], capture_output=True, text=True, timeout=60)
    commands = done.stdout.partition("Commands:")[2]
    assert done.returncode == 0 and commands and "..." not in commands


def test_a_file_that_cannot_be_used_is_named() -> None:
    done = run("open")
    assert (done.returncode, done.stderr) == (1, "some-program: error: '/nowhere/at all': No such file or directory.\n")


def test_characters_that_stdout_does_not_have() -> None:
    """Names of files that are not UTF-8 reach Python as lone surrogates."""
    done = run("surrogate", PYTHONIOENCODING="utf-8:strict")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\udcff\n", "")


def test_nothing_is_printed_into_a_file_that_got_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    assert run("write", "<&- >&- 2>&-", tmp_path).returncode == 0
    assert (tmp_path / "kept").read_text() == "profile"
