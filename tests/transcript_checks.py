"""What must hold for a transcript of any content: shared by the property tests and by the coverage-guided fuzzer."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark_moe.errors import CorpusError
from pyspark_moe.history import SOURCES, Conversation, History, HistoryFolder, Message, ReadLimits, ReadReport
from pyspark_moe.history.corpus import read_corpus, write_corpus

LIMITS = ReadLimits(max_line_bytes=1 << 16, max_message_bytes=1000, max_calls=4, max_session_bytes=20_000, max_scan_bytes=1 << 20)


def check_message(message: Message, limits: ReadLimits) -> None:
    """Roles, sizes and texts are what the readers promise."""
    assert message.role in ("user", "assistant", "tool")
    assert message.role != "assistant" or message.text or message.thinking or message.tool_calls, "an empty answer"
    assert message.role != "user" or message.text, "an empty question"
    assert len(message.tool_calls) <= limits.max_calls
    for text in (message.text, message.thinking):
        assert len(text.encode()) <= limits.max_message_bytes and "\0" not in text
    for text in (message.call_id, message.name, message.thread, message.key):
        text.encode()
    for call in message.tool_calls:
        assert call.name and len(call.arguments.encode()) <= limits.max_message_bytes
        assert isinstance(json.loads(call.arguments), dict)


def check_transcript(data: bytes, source: str, folder: Path) -> list[Conversation]:
    """A file of these bytes is read without an exception, within the limits, and what comes out is a corpus. `folder` is
    written to; the conversations are given back."""
    name = "rollout-1.jsonl" if source == "codex" else ("session.jsonl", "agent-1.jsonl")[len(data) % 2]
    path = folder / "p" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    history = History.find([HistoryFolder(source, folder)])
    assert [session.path for session in history.sessions] == [path]
    report = ReadReport()
    messages = list(SOURCES[source].read(history.sessions[0], LIMITS, report))
    for message in messages:
        check_message(message, LIMITS)
    n_bytes = sum(message.n_bytes for message in messages)
    most = (2 + 2 * LIMITS.max_calls) * LIMITS.max_message_bytes  # of one message
    assert n_bytes <= LIMITS.max_session_bytes + LIMITS.max_line_bytes + 20 * most, "a session without an end"
    assert (report.n_messages, report.n_bytes) == (len(messages), n_bytes)
    assert all(count > 0 for count in report.skipped.values()) and "\n" not in report.text()

    conversations = list(history.conversations(LIMITS))
    assert sum(len(conversation.messages) for conversation in conversations) <= len(messages)
    twice = History(history.folders, (history.sessions[0], history.sessions[0]))
    again = sum(len(conversation.messages) for conversation in twice.conversations(LIMITS))
    first = sum(len(conversation.messages) for conversation in conversations)
    assert again <= first + 1, "a second reading of a file gave what was read before"

    corpus = folder / "corpus.jsonl.part"
    write_corpus(corpus, conversations, replace=True)
    read = list(read_corpus(corpus))
    assert [c.messages for c in read] == [c.messages for c in conversations]
    corpus.unlink()
    return conversations


def check_corpus(data: bytes, folder: Path) -> None:
    """A corpus of these bytes is read, or refused with a sentence; what is read can be written and read again."""
    path = folder / "any.corpus"
    path.write_bytes(data)
    conversations = []
    try:
        for conversation in read_corpus(path):
            conversations.append(conversation)
    except CorpusError as e:
        assert "line" in str(e) and str(e).endswith(".")
    for conversation in conversations:
        assert conversation.n_bytes >= 0 and all(message.digest() for message in conversation.messages)
    copy = folder / "copy.corpus"
    write_corpus(copy, conversations, replace=True)
    assert [c.messages for c in read_corpus(copy)] == [c.messages for c in conversations]
