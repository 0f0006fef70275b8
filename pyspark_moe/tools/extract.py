"""pyspark-moe extract: agent history as a corpus for `calibrate` and a held-out one for `validate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..budget import format_bytes
from ..command import end_on_sigterm
from ..errors import ConfigError, HistoryError
from ..history import CLAUDE_CODE, CODEX, Conversation, History, HistoryFolder, chosen_folders
from ..history.corpus import is_held_out, write_split


def _existing(folders: tuple[HistoryFolder, ...], named: dict[str, str | None]) -> tuple[HistoryFolder, ...]:
    """The folders; HistoryError for one that was named and is not there, or when there is none at all."""
    for folder in folders:
        if named[folder.source] and not folder.path.is_dir():
            raise HistoryError(f"{folder.path} is not a folder: give the one where {folder.source} keeps its sessions, or none.")
    if not folders:
        raise HistoryError("Every source of history is turned off: leave out one of --claude-code none and --codex none.")
    return folders


def _shown(history: History) -> Iterator[Conversation]:
    """The conversations of a history, with a progress bar over its sessions while they are used."""
    place = {session.path: n for n, session in enumerate(history.sessions, 1)}
    with click.progressbar(length=len(history.sessions), label="Reading sessions", file=sys.stderr) as bar:
        for conversation in history.conversations():
            bar.update(place[conversation.session.path] - bar.pos)
            yield conversation
        bar.update(len(history.sessions) - bar.pos)


@click.command()
@click.option("--claude-code", metavar="DIR", help="Claude Code's folder, or none. [default: where CLAUDE_CONFIG_DIR says, else ~/.claude]")
@click.option("--codex", metavar="DIR", help="Codex's folder, or none. [default: where CODEX_HOME says, else ~/.codex]")
@click.option("--out", required=True, metavar="FOLDER", type=click.Path(path_type=Path), help="Where train.jsonl and heldout.jsonl are written.")
@click.option("--test-fraction", default=0.1, show_default=True, type=float, help="Share of sessions that is held out, between 0 and 1.")
@click.option("--max-sessions", default=1000, show_default=True, type=click.IntRange(1), help="Sessions to take, newest and most diverse first.")
@click.option("--max-bytes", default=64 << 20, show_default=True, type=click.IntRange(1), help="Text to take.")
@click.option("--force", is_flag=True, help="Replace files that are there already.")
def extract(claude_code: str | None, codex: str | None, out: Path, test_fraction: float, max_sessions: int, max_bytes: int, force: bool) -> None:
    """Writes what you and your coding agents said to two files in FOLDER, split by session.

    The files hold your conversations as text, are readable by you only, and are used by nothing until you name them.
    """
    is_held_out("", test_fraction)
    end_on_sigterm()
    named = {CLAUDE_CODE: claude_code, CODEX: codex}
    folders = _existing(chosen_folders(os.environ, Path.home(), named), named)
    history = History.find(folders)
    if not history.sessions:
        looked = ", ".join(str(folder.path) for folder in folders)
        raise HistoryError(f"No session of a coding agent was found in {looked}: name another folder with --claude-code or --codex.")
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out} cannot be made: {e.strerror or e}.") from None
    split = write_split(out, _shown(history), test_fraction, max_sessions=max_sessions, max_bytes=max_bytes, replace=force)
    where = " and ".join(str(folder.path) for folder in history.folders)
    report = history.report
    click.echo(f"Found {len(history.sessions)} sessions in {where}; read {report.n_messages} messages, {format_bytes(report.n_bytes)} of text.")
    click.echo(f"Left out: {report.text() or 'nothing'}.")
    for path, n, n_bytes in ((split.train, split.n_train, split.train_bytes), (split.held_out, split.n_held_out, split.held_out_bytes)):
        click.echo(f"Wrote {path}: {n} conversations, {format_bytes(n_bytes)} of text.")
    empty = [path.name for path, n in ((split.train, split.n_train), (split.held_out, split.n_held_out)) if not n]
    if empty:
        click.echo(f"Empty: {' and '.join(empty)}. Choose another --test-fraction, or a larger --max-sessions or --max-bytes.", err=True)
