"""A model without a profile reads the user's agent history first, so that its hot experts are known before the first request.

Only routing counts leave this step: no text is stored, logged or sent anywhere. It stops at its limits of tokens and time,
or when it is told to, and what was counted until then is used.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

import click

from .config import SparkConfig
from .errors import ConfigError, InternalError, InvalidArgumentError
from .history import CLAUDE_CODE, CODEX, Conversation, History, HistoryFolder, Message, default_folders
from .history.corpus import message_object

# A conversation is read in pieces: what a model selects depends on a few thousand tokens, and attention over more costs time.
PIECE_TOKENS = 4096
_SESSION_TOKENS = 512  # of each session at least: its topic shows by then
_BYTES_PER_TOKEN = 3  # from below, so that a piece is seldom cut


class Reader(Protocol):
    """What reads on a loaded model; prefill.Prefill is one."""

    def begin_chat(self, messages: str, n_max: int) -> tuple[int, bool]: ...
    def step(self) -> int: ...


@dataclass(frozen=True)
class ReadingLimits:
    """tokens in all, seconds in all, and tokens of one session, so that many are seen."""

    tokens: int = 100_000
    seconds: float = 45.0
    tokens_per_session: int = PIECE_TOKENS


@dataclass(frozen=True)
class Reading:
    """What was read. n_plain: pieces that the model's template refused. ended: why it stopped, for the user."""

    n_tokens: int
    n_pieces: int
    n_plain: int
    seconds: float
    ended: str


def check_history(config: SparkConfig) -> None:
    """Raises ConfigError for a folder that is not there."""
    if config.history not in ("auto", "none") and not Path(config.history).expanduser().is_dir():
        raise ConfigError(f"--spark-history '{config.history}' is no folder: give one with Claude Code's or Codex's sessions, auto, or none.")


def find_history(config: SparkConfig) -> History | None:
    """The history that the configuration names; None when it is turned off. Raises ConfigError for a folder that is not there."""
    if config.history == "none":
        return None
    if config.history == "auto":
        return History.find(default_folders(os.environ, Path.home()))
    check_history(config)
    folder = Path(config.history).expanduser()
    if (folder / "projects").is_dir() or (folder / "sessions").is_dir():  # an agent's whole folder
        return History.find((HistoryFolder(CLAUDE_CODE, folder / "projects"), HistoryFolder(CODEX, folder / "sessions")))
    return History.find((HistoryFolder(CLAUDE_CODE, folder), HistoryFolder(CODEX, folder)))


def read_conversations(
    conversations: Iterable[Conversation],
    reader: Reader,
    limits: ReadingLimits,
    *,
    progress: Callable[[float], None] = lambda share: None,
    is_skipped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> Reading:
    """Has the model read conversations until a limit, and counts. progress: gets the share that is done, 0 to 1."""
    start = clock()
    n_tokens = n_pieces = n_plain = 0
    of_session: dict[tuple[Path, str], int] = {}  # all sessions of a corpus have its path

    def ended() -> str | None:
        if is_skipped():
            return "skipped"
        if n_tokens >= limits.tokens:
            return f"the limit of {limits.tokens} tokens"
        return f"the limit of {limits.seconds:g} s" if clock() - start >= limits.seconds else None

    for conversation in conversations:
        session = (conversation.session.path, conversation.session.session)
        for messages in _pieces(conversation.messages):
            left = min(limits.tokens - n_tokens, limits.tokens_per_session - of_session.get(session, 0), PIECE_TOKENS)
            if left <= 0:
                break
            try:
                n, is_plain = reader.begin_chat(json.dumps([message_object(m) for m in messages]), left)
            except InvalidArgumentError:
                continue  # llama.cpp takes no such messages, for example a tool's answer alone
            n_pieces += 1
            n_plain += is_plain
            while n > 0:
                n_left = reader.step()
                n_tokens += n - n_left
                of_session[session] = of_session.get(session, 0) + n - n_left
                n = n_left
                progress(min(1.0, max(n_tokens / limits.tokens, (clock() - start) / limits.seconds)))
                if (why := ended()) is not None:
                    return Reading(n_tokens, n_pieces, n_plain, clock() - start, why)
        if (why := ended()) is not None:
            return Reading(n_tokens, n_pieces, n_plain, clock() - start, why)
    return Reading(n_tokens, n_pieces, n_plain, clock() - start, "all of it")


def _pieces(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Messages that follow one another, about PIECE_TOKENS together; a long one is a piece of its own."""
    piece: list[Message] = []
    n_bytes = 0
    for message in messages:
        size = message.n_bytes
        if piece and n_bytes + size > PIECE_TOKENS * _BYTES_PER_TOKEN:
            yield piece
            piece, n_bytes = [], 0
        piece.append(message)
        n_bytes += size
    if piece:
        yield piece


def read_history(history: History, config: SparkConfig, reader: Reader, say: Callable[[str], None]) -> Reading | None:
    """Has the model read the user's history, with a progress bar, and says what was read; None when there was nothing. A
    failing computation ends it. Ctrl-C skips the rest."""
    if not history.sessions:
        folders = ", ".join(str(folder.path) for folder in history.folders) or "its usual folders"
        say(f"  history no sessions of coding agents in {folders}: which experts are hot is learned from the requests")
        return None
    n = len(history.sessions)
    limits = ReadingLimits(config.history_tokens, config.history_seconds, max(_SESSION_TOKENS, config.history_tokens // n))
    say(
        f"  history reading at most {limits.tokens} tokens, {limits.seconds:g} s, of {n} sessions in {', '.join(str(f.path) for f in history.folders)}, to learn "
        "which experts are hot; no text is kept. Ctrl-C skips it, --spark-history none turns it off"
    )
    with _progress_bar() as progress, _interrupts() as is_skipped:
        try:
            done = read_conversations(history.conversations(), reader, limits, progress=progress, is_skipped=is_skipped)
        except InternalError as e:
            say(f"  history ended early: {e}")
            return None
    plain = f", {done.n_plain} of {done.n_pieces} pieces without the chat template, which refused them" if done.n_plain else ""
    left_out = history.report.text()
    say(f"  history read {done.n_tokens} tokens of {history.n_sessions_read} sessions in {done.seconds:.1f} s ({done.ended}){plain}")
    if left_out:
        say(f"  history left out: {left_out}")
    return done


@contextmanager
def _progress_bar() -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda share: None
        return
    steps = 1000
    with click.progressbar(length=steps, label="spark:   history", file=sys.stderr, show_eta=False, show_percent=True, update_min_steps=5) as bar:
        yield lambda share: bar.update(int(share * steps) - bar.pos)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C only says so here, where Python's signal handlers can be set: in the main thread."""
    seen = threading.Event()

    def note(_number: int, _frame: FrameType | None) -> None:
        seen.set()

    if threading.current_thread() is not threading.main_thread():
        yield seen.is_set
        return
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield seen.is_set
    finally:
        with suppress(TypeError):  # a handler that C set cannot be put back from here
            signal.signal(signal.SIGINT, before)
