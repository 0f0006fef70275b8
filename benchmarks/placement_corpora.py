"""Text for bench_placement.py: a corpus to learn from, a held-out one of the same kinds, and the first as agents' transcripts.

A trained model gets the held-out documents of tests/data. A model of scripts/make_synthetic_moe.py, which routes by the topic of
a token, gets words of a few of its topics, since any other text would be of all topics at once.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import common
import numpy as np
from gguf import GGUFReader

sys.path += [str(common.ROOT / "tests"), str(common.ROOT / "scripts")]
import corpora  # noqa: E402
import transcripts  # noqa: E402
from synthetic_moe.writer import TOPIC_KEYS  # noqa: E402

from pyspark_moe.history.corpus import read_corpus, write_corpus  # noqa: E402

_SPACE = "Ġ"  # how the tokenizer writes a blank before a word
_LEAST_WORDS = 20


@dataclass(frozen=True)
class Text:
    """train and heldout: corpora as `pyspark-moe extract` writes them. history: a folder with sessions of Claude Code and Codex about
    train, each session one conversation of it."""

    train: Path
    heldout: Path
    history: Path
    kind: str


def make_text(model: Path, folder: Path, n_topics: int) -> Text:
    """Everything in `folder`. n_topics: of a synthetic model, so many of its topics."""
    words = topic_words(model, n_topics)
    if words:
        train, heldout = folder / "train.jsonl", folder / "heldout.jsonl"
        for path, seed, n in ((train, 1, 9), (heldout, 2, 3)):
            made = [topic_conversation(f"{path.stem}-{i}", words[i % len(words)], seed * 1000 + i) for i in range(n * len(words))]
            write_corpus(path, made, replace=True)
    else:
        train, heldout = corpora.write_corpora(folder)
    return Text(train, heldout, write_transcripts(train, folder), f"{len(words)} topics of a synthetic model" if words else "tests/data/heldout.jsonl")


def topic_words(model: Path, n_topics: int) -> list[list[str]]:
    """The words that are one token, of the first n_topics topics that have enough of them; [] for a model that has no topics."""
    fields = GGUFReader(model).fields
    if f"{TOPIC_KEYS}.topics" not in fields:
        return []
    n_all, n_token, first = (int(fields[f"{TOPIC_KEYS}.{key}"].contents()) for key in ("topics", "tokens", "first_token"))
    tokens = fields["tokenizer.ggml.tokens"].contents()
    found: list[list[str]] = []
    for topic in range(n_all):
        ids = range(max(first, -(-topic * n_token // n_all)), -(-(topic + 1) * n_token // n_all))
        words = [tokens[i][1:] for i in ids if tokens[i].startswith(_SPACE) and tokens[i][1:].isascii() and tokens[i][1:].isalpha()]
        if len(words) >= _LEAST_WORDS and len(found) < n_topics:
            found.append(words)
    return found


def topic_conversation(name: str, words: Sequence[str], seed: int, n_turns: int = 5, n_words: int = 160) -> corpora.Conversation:
    """Questions and answers of n_words words of one topic."""
    rng = np.random.default_rng(seed)
    return corpora.conversation(name, *(" " + " ".join(rng.choice(words, n_words)) for _ in range(2 * n_turns)))


def write_transcripts(train: Path, folder: Path) -> Path:
    """Both agents' sessions in one folder, as `--spark-history` takes it: each tells one conversation of the corpus."""
    conversations = [[message.text for message in conversation.messages] for conversation in read_corpus(train)]
    told: dict[str, tuple[list[str], count[int]]] = {}

    def turn(text: transcripts.Text) -> transcripts.Turn:
        texts, at = told.setdefault(text.topic, (conversations[len(told) % len(conversations)], count()))
        n = next(at)
        question, answer = texts[2 * n % len(texts)], texts[(2 * n + 1) % len(texts)]
        half = len(answer) // 2
        return transcripts.Turn(question, f"Step {n} of {text.topic}.", "Read", {"file_path": f"{text.topic}/{n}"}, answer[:half], answer[half:] or "Done.")

    home = folder / "home"
    transcripts.write_history(home, n_projects=3, n_sessions=-(-len(conversations) // 6), make_turn=turn)
    history = folder / "history"
    history.mkdir()
    (home / ".claude/projects").rename(history / "projects")
    (home / ".codex/sessions").rename(history / "sessions")
    return history
