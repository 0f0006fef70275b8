"""Text to measure with when no corpus is given: the source code of this package, each file with a question about it."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from ..history import Conversation, Message, SessionFile

NAME = "source of pyspark_moe"
_LEAST_BYTES = 1000
_QUESTIONS = (
    "What does this file do, and which of its functions would you change first?",
    "Write tests for this file with pytest.",
    "Find the bugs in this file. Quote each line that is wrong.",
    "Write this file again in Rust.",
    "Explain this file to somebody who has never seen Python.",
    "Write the documentation of this file in Markdown, with an example of its use.",
    "Schreibe eine Zusammenfassung dieser Datei auf Deutsch.",
)


def _files() -> list[Path]:
    root = Path(__file__).resolve().parent.parent
    return sorted(path for path in root.rglob("*.py") if path.stat().st_size >= _LEAST_BYTES)


def conversations(seed: int) -> list[Conversation]:
    """One for each file, in an order that depends on the seed."""
    found = []
    for number, path in enumerate(_files()):
        text = f"```python\n{path.read_text(encoding='utf-8')}```\n\n{_QUESTIONS[number % len(_QUESTIONS)]}"
        found.append(Conversation(SessionFile("source", path, 0.0, len(text), "", path.name), (Message("user", text),)))
    random.Random(seed).shuffle(found)
    return found


def digest() -> str:
    """SHA-256 of all of them, 64 hexadecimal digits."""
    hashed = hashlib.sha256()
    for path in _files():
        hashed.update(path.read_bytes())
    return hashed.hexdigest()
