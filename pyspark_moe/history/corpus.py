"""A corpus: conversations in a file, one JSON object a line, messages in OpenAI's form.

    {"source": "codex", "project": "...", "session": "...", "thread": "", "family": "9c56...", "messages": [
      {"role": "user", "content": "..."},
      {"role": "assistant", "content": "...", "reasoning_content": "...", "tool_calls": [
        {"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}]},
      {"role": "tool", "tool_call_id": "...", "name": "...", "content": "..."}]}

Reading is strict: a damaged corpus is an error with the line's number, since results that depend on it would be wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..errors import ConfigError, CorpusError
from .base import ROLES, Conversation, Message, SessionFile, ToolCall

MAX_LINE_BYTES = 32 << 20  # of a conversation as it is written; longer ones are written in parts
_SPLIT = b"pyspark-moe corpus 1 "


def is_held_out(family: str, test_fraction: float) -> bool:
    """Whether a family of sessions belongs to the held-out part: a hash of its name alone decides, so a family stays on its
    side whatever else is read, and a larger fraction keeps what a smaller one held out. ConfigError unless 0 < fraction < 1."""
    if not 0 < test_fraction < 1:
        raise ConfigError(f"A test fraction of {test_fraction} leaves one side empty: give a number between 0 and 1, for example 0.1.")
    value = int.from_bytes(hashlib.sha256(_SPLIT + family.encode("utf-8", "replace")).digest()[:8], "big")
    return value < test_fraction * 2.0**64


def message_object(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form, with thinking as reasoning_content; what is empty is left out, except content."""
    result: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.thinking:
        result["reasoning_content"] = message.thinking
    if message.tool_calls:
        result["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls
        ]
    if message.role == "tool":
        result["tool_call_id"] = message.call_id
        if message.name:
            result["name"] = message.name
    return result


class CorpusWriter:
    """Writes a corpus that appears under its name, whole and readable by its owner only, when `with` ends without an error;
    otherwise nothing is left. ConfigError when the file is there already and may not be replaced."""

    def __init__(self, path: Path, replace: bool = False) -> None:
        self.path, self.replace = path, replace
        self.n_conversations = 0
        self.n_bytes = 0
        self._file: IO[bytes] | None = None
        self._temporary = ""

    def __enter__(self) -> CorpusWriter:
        self._refuse_existing()
        try:
            descriptor, self._temporary = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)  # mode 0600
        except OSError as e:
            raise self._unwritable(e) from None
        self._file = open(descriptor, "wb")
        return self

    def write(self, conversation: Conversation) -> None:
        """Adds a conversation; n_bytes counts its text."""
        if self._file is None:
            raise ValueError("the corpus is not open")
        for line in _lines(conversation):
            try:
                self._file.write(line)
            except OSError as e:
                raise self._unwritable(e) from None
            self.n_conversations += 1
        self.n_bytes += conversation.n_bytes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with file:
                if kind is None:
                    file.flush()
                    os.fsync(file.fileno())
            if kind is None:
                self._refuse_existing()
                os.replace(self._temporary, self.path)
                self._temporary = ""
        except OSError as e:
            if kind is None:
                raise self._unwritable(e) from None
        finally:
            if self._temporary:
                os.unlink(self._temporary)

    def _unwritable(self, error: OSError) -> CorpusError:
        return CorpusError(f"{self.path} cannot be written: {error.strerror or error}.")

    def _refuse_existing(self) -> None:
        if not self.replace and os.path.lexists(self.path):
            raise ConfigError(f"{self.path} exists: choose another folder, or --force to replace it.")


def _lines(conversation: Conversation) -> Iterator[bytes]:
    """The conversation's line, or as many as it takes to keep within what read_corpus accepts."""
    session = conversation.session
    value = {
        "source": session.source, "project": session.project, "session": session.session, "thread": conversation.thread,
        "family": conversation.family, "messages": [message_object(message) for message in conversation.messages],
    }
    line = json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    n = len(conversation.messages)
    if len(line) <= MAX_LINE_BYTES or n < 2:
        yield line
        return
    for part in (conversation.messages[: n // 2], conversation.messages[n // 2 :]):
        yield from _lines(Conversation(session, part, conversation.thread, conversation.family))


def write_corpus(path: Path, conversations: Iterable[Conversation], replace: bool = False) -> int:
    """Writes a corpus as CorpusWriter does; the number of lines in it."""
    with CorpusWriter(path, replace) as writer:
        for conversation in conversations:
            writer.write(conversation)
    return writer.n_conversations


@dataclass(frozen=True)
class Split:
    """What went where. Sizes are bytes of text."""

    train: Path
    held_out: Path
    n_train: int
    n_held_out: int
    train_bytes: int
    held_out_bytes: int


def write_split(
    folder: Path, conversations: Iterable[Conversation], test_fraction: float, *, max_sessions: int, max_bytes: int, replace: bool = False
) -> Split:
    """train.jsonl and heldout.jsonl in `folder`, from the first conversations that stay within `max_sessions` transcripts and
    `max_bytes` of text. Each family of sessions is on one side (is_held_out). ConfigError, CorpusError; then neither is
    written."""
    is_held_out("", test_fraction)  # a fraction that is refused is refused before anything is read
    train, held_out = CorpusWriter(folder / "train.jsonl", replace), CorpusWriter(folder / "heldout.jsonl", replace)
    sessions: set[Path] = set()
    with train, held_out:
        for conversation in conversations:
            sessions.add(conversation.session.path)
            if len(sessions) > max_sessions or train.n_bytes + held_out.n_bytes + conversation.n_bytes > max_bytes:
                break
            (held_out if is_held_out(conversation.family, test_fraction) else train).write(conversation)
    return Split(train.path, held_out.path, train.n_conversations, held_out.n_conversations, train.n_bytes, held_out.n_bytes)


def read_corpus(path: Path) -> Iterator[Conversation]:
    """The conversations of a corpus, one in memory at a time. The session of each has the corpus as its path.

    CorpusError when the file cannot be read, or a line is damaged: cut off, too long, or not what CorpusWriter writes.
    """
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                try:
                    yield _conversation(line, path)
                except (ValueError, RecursionError) as e:
                    raise CorpusError(f"{path}, line {number}: {e or 'nested too deeply'}. Write it again with `pyspark-moe extract`.") from None
    except OSError as e:
        raise CorpusError(f"{path} cannot be read: {e.strerror or e}.") from None


class ShuffledCorpus:
    """The conversations of a corpus in an order that depends on a seed and the lines' numbers alone, on any machine.

    path, seed        the order is by a hash of seed and line number
    n_conversations   lines
    session_bytes     (source, session) -> bytes of text; a session may have several lines

    Made by reading all of it once, so that a damaged line is found before anything else begins; then one conversation is in
    memory at a time, and 24 bytes for each line. CorpusError as for read_corpus, and for an empty corpus.
    """

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.path, self.seed = path, seed
        self.session_bytes: dict[tuple[str, str], int] = {}
        order: list[tuple[bytes, int]] = []
        offset = 0
        for number, conversation in enumerate(read_corpus(path)):
            session = conversation.session
            key = (session.source, session.session)
            self.session_bytes[key] = self.session_bytes.get(key, 0) + conversation.n_bytes
            order.append((hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), offset))
            offset += session.n_bytes  # of the line
        if not order:
            raise CorpusError(f"{path} has no conversations: make a corpus with `pyspark-moe extract`.")
        self.n_conversations = len(order)
        self._offsets = array("q", (offset for _, offset in sorted(order)))

    def __iter__(self) -> Iterator[Conversation]:
        """CorpusError where the file has changed since."""
        try:
            with open(self.path, "rb") as file:
                for offset in self._offsets:
                    file.seek(offset)
                    yield _conversation(file.readline(MAX_LINE_BYTES + 1), self.path)
        except (ValueError, RecursionError) as e:
            raise CorpusError(f"{self.path} has changed while it was read: {e or 'nested too deeply'}.") from None
        except OSError as e:
            raise CorpusError(f"{self.path} cannot be read: {e.strerror or e}.") from None


def _conversation(line: bytes, path: Path) -> Conversation:
    if not line.endswith(b"\n"):
        raise ValueError("longer than a conversation may be" if len(line) > MAX_LINE_BYTES else "cut off")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as e:
        raise ValueError(f"not JSON ({e.msg})") from None
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("no list of messages")
    session = SessionFile(_text(value, "source"), path, 0.0, len(line), _text(value, "project"), _text(value, "session"))
    return Conversation(session, tuple(_message(item) for item in messages), _text(value, "thread"), _text(value, "family"))


def _message(item: Any) -> Message:
    if not isinstance(item, dict) or item.get("role") not in ROLES:
        raise ValueError(f"a message whose role is none of {', '.join(ROLES)}")
    calls = item.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError("tool_calls that are no list")
    tool_calls = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError("a tool call without a function")
        tool_calls.append(ToolCall(_text(function, "name"), _text(function, "arguments"), _text(call, "id")))
    call_id, name = _text(item, "tool_call_id"), _text(item, "name")
    if item["role"] != "tool":
        call_id = name = ""  # OpenAI allows a name there; it says nothing to a model
    return Message(item["role"], _text(item, "content"), _text(item, "reasoning_content"), tuple(tool_calls), call_id, name)


def _text(value: dict[str, Any], key: str) -> str:
    """A string, "" when it is missing; ValueError for anything else, or for text that is not UTF-8 (a lone surrogate)."""
    text = value.get(key, "")
    if not isinstance(text, str):
        raise ValueError(f"{key} that is no text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{key} with half a character") from None
    return text
