"""What a coding agent's session is here, and what every reader of one promises. A leaf: standard library only.

A reader never raises for what is in a file: it leaves out what it does not understand and counts that in a `ReadReport`.
Text it returns can always be encoded as UTF-8, holds no NUL and no inline images, and is never longer than `ReadLimits`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

CLAUDE_CODE = "claude-code"
CODEX = "codex"
ROLES = ("user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """A tool that the agent called. `arguments`: JSON text as the agent sent it; `call_id`: what the answer refers to."""

    name: str
    arguments: str
    call_id: str = ""


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    role      "user", "assistant" or "tool" (what a tool answered)
    thinking  of an assistant, before its text
    call_id, name   of the call that a tool message answers; name is "" when the call was not seen
    thread    "" for the session itself, else the sidechain (an agent started by the session) that it belongs to
    key       what the agent itself calls this message, "" when it has no name for it; copies of a message share it
    """

    role: str
    text: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    thread: str = field(default="", compare=False)
    key: str = field(default="", compare=False)

    @property
    def n_bytes(self) -> int:
        """Bytes of everything that counts as text, in UTF-8."""
        parts = [self.text, self.thinking, *(part for call in self.tool_calls for part in (call.name, call.arguments))]
        return sum(len(part.encode()) for part in parts)

    def digest(self) -> bytes:
        """16 bytes that two messages share only when their content is the same (names and ids aside)."""
        parts = [self.role, self.text, self.thinking, *(part for call in self.tool_calls for part in (call.name, call.arguments))]
        hashed = blake2b(digest_size=16)
        for part in parts:
            data = part.encode()
            hashed.update(len(data).to_bytes(8, "little") + data)
        return hashed.digest()


@dataclass(frozen=True)
class SessionFile:
    """A transcript: what its folder says about it, before it is read.

    modified  seconds since 1970
    project   where the agent worked: Claude Code's name of its folder, Codex's working directory; "" when not known
    session   the session's own name; an agent that a session started has that session's
    parent    the transcript of the session that started this agent, None for a session itself
    """

    source: str
    path: Path
    modified: float
    n_bytes: int
    project: str
    session: str = ""
    parent: Path | None = None


@dataclass(frozen=True)
class Conversation:
    """Messages that follow one another. `family`: sessions that continue or copy one another, and the agents they started,
    share it. A resumed session has only what is new in it, so the first message may have any role."""

    session: SessionFile
    messages: tuple[Message, ...]
    thread: str = ""
    family: str = ""

    @property
    def n_bytes(self) -> int:
        """Bytes of text, in UTF-8."""
        return sum(message.n_bytes for message in self.messages)


@dataclass(frozen=True)
class ReadLimits:
    """What a reader takes at most; together they bound its memory and, with the disk's speed, its time.

    max_line_bytes     a longer line is passed over without being held (mostly images): 4 MiB
    max_message_bytes  text, thinking and arguments of a message are cut at so many bytes each: 256 KiB
    max_calls          tool calls of a message: 64
    max_session_bytes  text of one file; the rest of it is not read: 8 MiB
    max_scan_bytes     bytes of one file that are looked at: 256 MiB
    """

    max_line_bytes: int = 4 << 20
    max_message_bytes: int = 256 << 10
    max_calls: int = 64
    max_session_bytes: int = 8 << 20
    max_scan_bytes: int = 256 << 20


@dataclass
class ReadReport:
    """What was read and what was not, counted; grows while readers run. The keys of `skipped` are for people: plural."""

    n_files: int = 0
    n_lines: int = 0
    n_messages: int = 0
    n_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def skip(self, what: str, n: int = 1) -> None:
        """Counts `n` of something that was left out."""
        self.skipped[what] += n

    def text(self) -> str:
        """What was left out, one line, the most frequent first; "" when nothing was."""
        return ", ".join(f"{n} {what}" for what, n in sorted(self.skipped.items(), key=lambda item: (-item[1], item[0])))


class HistorySource(Protocol):
    """One agent's way to keep its sessions."""

    name: str

    def folder(self, environment: Mapping[str, str], home: Path) -> Path:
        """Where the agent keeps them, by its own rules; need not exist."""
        ...

    def find(self, folder: Path, report: ReadReport | None = None) -> Iterator[SessionFile]:
        """The transcripts below `folder`, which may be what `folder()` gives or the agent's configuration folder above it.
        Names only, as far as the agent's format allows. Nothing but regular files is ever opened."""
        ...

    def read(self, file: SessionFile, limits: ReadLimits = ReadLimits(), report: ReadReport | None = None) -> Iterator[Message]:
        """The messages of a transcript in their order, while it is read. Raises nothing for any content."""
        ...
