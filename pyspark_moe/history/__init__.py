"""History of coding agents on this machine, as conversations: found, sampled, read within limits, repeated parts once.

    history = History.find(default_folders(os.environ, Path.home()))
    for conversation in history.conversations():
        ...

Nothing here knows a model, writes a file, reads the environment or uses a network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .base import (
    CLAUDE_CODE,
    CODEX,
    Conversation,
    HistorySource,
    Message,
    ReadLimits,
    ReadReport,
    SessionFile,
    ToolCall,
)
from .claude_code import ClaudeCode
from .codex import Codex
from .repeated import Repeated
from .sample import sample_sessions

__all__ = [
    "CLAUDE_CODE", "CODEX", "SOURCES", "Conversation", "History", "HistoryFolder", "HistorySource", "Message", "ReadLimits", "ReadReport",
    "SessionFile", "ToolCall", "chosen_folders", "default_folders", "sample_sessions",
]

SOURCES: dict[str, HistorySource] = {source.name: source for source in (ClaudeCode(), Codex())}


@dataclass(frozen=True)
class HistoryFolder:
    """Where one agent's sessions are looked for. `source`: CLAUDE_CODE or CODEX."""

    source: str
    path: Path


def default_folders(environment: Mapping[str, str], home: Path) -> tuple[HistoryFolder, ...]:
    """Where each agent keeps its sessions; CLAUDE_CONFIG_DIR and CODEX_HOME of `environment` count. Need not exist."""
    return tuple(HistoryFolder(name, source.folder(environment, home)) for name, source in SOURCES.items())


def chosen_folders(environment: Mapping[str, str], home: Path, chosen: Mapping[str, str | None]) -> tuple[HistoryFolder, ...]:
    """The default folders, except where `chosen` names another for an agent, or "none" to leave it out."""
    folders = []
    for folder in default_folders(environment, home):
        path = chosen.get(folder.source)
        if path != "none":
            folders.append(HistoryFolder(folder.source, Path(path)) if path else folder)
    return tuple(folders)


@dataclass
class History:
    """Sessions in the order they should be read, and what happened while they were.

    folders   those that were looked at and are there
    sessions  newest and most diverse first
    report    counts what was found, read and left out, while it happens
    n_sessions_read  sessions that gave at least one message so far
    """

    folders: tuple[HistoryFolder, ...]
    sessions: tuple[SessionFile, ...]
    report: ReadReport = field(default_factory=ReadReport)
    n_sessions_read: int = 0

    @classmethod
    def find(cls, folders: Iterable[HistoryFolder]) -> History:
        """Looks for transcripts; a folder that does not exist is no error. Two names of one folder count once."""
        report = ReadReport()
        present: dict[str, HistoryFolder] = {}
        for folder in folders:
            if os.path.isdir(folder.path):
                present.setdefault(f"{folder.source} {os.path.realpath(folder.path)}", folder)
        found = [file for folder in present.values() for file in SOURCES[folder.source].find(folder.path, report)]
        return cls(tuple(present.values()), tuple(sample_sessions(found)), report)

    def conversations(self, limits: ReadLimits = ReadLimits()) -> Iterator[Conversation]:
        """One after the other, each in memory while it is used: the session itself, then the agents inside its transcript.
        Sessions without anything new give none. Raises nothing for any content; stop by no longer asking."""
        repeated = Repeated()
        families: dict[Path, str] = {}
        for session in self.sessions:
            threads: dict[str, list[Message]] = {}
            opening = ""
            read = SOURCES[session.source].read(session, limits, self.report)
            for message, new in repeated.tell(read, session.source):
                opening = opening or _family(message)
                if new:
                    threads.setdefault(message.thread, []).append(message)
                else:
                    self.report.skip("messages that were read before")
            if not threads:
                continue
            family = families.setdefault(session.path, opening)
            if session.parent is not None:
                family = families.get(session.parent) or self._family_of(session) or opening
                families.setdefault(session.parent, family)
            self.n_sessions_read += 1
            for thread, messages in sorted(threads.items(), key=lambda item: item[0] != ""):
                yield Conversation(session, tuple(messages), thread, family)

    def _family_of(self, agent: SessionFile) -> str:
        """The family of the session that started an agent, from its first message."""
        if agent.parent is None:
            return ""
        parent = SessionFile(agent.source, agent.parent, 0.0, 0, agent.project, agent.session)
        first = next(iter(SOURCES[agent.source].read(parent, ReadLimits(max_scan_bytes=1 << 20), ReadReport())), None)
        return _family(first) if first else ""


def _family(message: Message) -> str:
    """A name that sessions with the same beginning share."""
    return message.digest().hex()

