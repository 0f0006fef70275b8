"""Corpora for tests, made of the held-out text in tests/data."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark_moe.history import Conversation, Message, SessionFile
from pyspark_moe.history.corpus import write_corpus

HELD_OUT = Path(__file__).resolve().parent / "data" / "heldout.jsonl"


def conversation(session: str, *texts: str, project: str = "") -> Conversation:
    """Texts by user and assistant in turns."""
    messages = tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))
    return Conversation(SessionFile("claude-code", Path("x"), 0.0, 0, project, session), messages, "", session)


def document_conversation(number: int, document: dict[str, str], most: int = 8000) -> Conversation:
    """A document as questions of 600 characters and answers of 1000: what follows in the text."""
    text, parts = document["text"], []
    for at in range(0, min(most, len(text) - 400), 1600):
        parts += [text[at : at + 600], text[at + 600 : at + 1600]]
    return conversation(f"s{number}", *parts, project=document["domain"])


def write_corpora(folder: Path) -> tuple[Path, Path]:
    """train.jsonl and heldout.jsonl in `folder`: three and one of every four held-out documents, of all four domains."""
    documents = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    conversations = [(i, c) for i, d in enumerate(documents) if (c := document_conversation(i, d)).messages]
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, is_train in zip(paths, (True, False)):
        write_corpus(path, [c for i, c in conversations if (i % 4 != 3) == is_train], replace=True)
    return paths
