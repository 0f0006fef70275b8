"""From folders to conversations: the order of sessions, repeated history, families; and the layer stays a leaf."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transcripts
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_moe.history import (
    Conversation,
    History,
    HistoryFolder,
    Message,
    SessionFile,
    chosen_folders,
    default_folders,
    sample_sessions,
)
from pyspark_moe.history.repeated import Repeated

PARTS = ("base", "lines", "text", "claude_code", "codex", "repeated", "sample", "corpus")


def every_text(conversations: list[Conversation]) -> Counter[str]:
    messages = [message for conversation in conversations for message in conversation.messages]
    return Counter(text for message in messages for text in (message.text, message.thinking) if text)


def test_everything_that_was_said_is_read_once_and_nothing_else(tmp_path: Path) -> None:
    written = transcripts.write_history(tmp_path)
    history = History.find(default_folders({}, tmp_path))
    conversations = list(history.conversations())
    assert len(history.sessions) == len(written.claude_code) + len(written.codex)
    assert every_text(conversations) == Counter(written.texts)
    everything = repr(conversations)
    assert transcripts.BOILERPLATE not in everything and transcripts.IMAGE[:40] not in everything
    assert history.n_sessions_read == len({c.session.path for c in conversations})
    assert history.report.n_bytes > sum(c.n_bytes for c in conversations) > 40_000, "copies were read, but count once"


def test_without_the_memory_of_copies_texts_count_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    written = transcripts.write_history(tmp_path)
    monkeypatch.setattr(Repeated, "tell", lambda self, messages, source: ((message, True) for message in messages))
    conversations = list(History.find(default_folders({}, tmp_path)).conversations())
    assert sum(every_text(conversations).values()) > 1.2 * len(written.texts)


def test_the_same_folders_give_the_same_conversations(tmp_path: Path) -> None:
    transcripts.write_history(tmp_path)
    folders = default_folders({}, tmp_path)
    first, second = (list(History.find(order).conversations()) for order in (folders, reversed(folders)))
    assert first == second and len(first) > 20


def test_continued_sessions_and_their_agents_are_one_family(tmp_path: Path) -> None:
    transcripts.write_history(tmp_path, n_projects=2, n_sessions=2)
    families: dict[str, set[str]] = {}
    for conversation in History.find(default_folders({}, tmp_path)).conversations():
        names = set(re.findall(r"(?:claude|codex)\ds\d", repr(conversation.messages)))
        assert len(names) == 1
        families.setdefault(names.pop(), set()).add(conversation.family)
    assert len(families) == 8 and all(len(ids) == 1 for ids in families.values()), families
    assert len(set.union(*families.values())) == 8, "different sessions are different families"


def test_stopping_early_reads_no_more(tmp_path: Path) -> None:
    transcripts.write_history(tmp_path)
    history = History.find(default_folders({}, tmp_path))
    assert len(list(itertools.islice(history.conversations(), 2))) == 2
    assert history.report.n_files <= 2


def test_folders(tmp_path: Path) -> None:
    assert default_folders({"CODEX_HOME": "/c"}, tmp_path) == (
        HistoryFolder("claude-code", tmp_path / ".claude/projects"), HistoryFolder("codex", Path("/c/sessions")),
    )
    assert chosen_folders({}, tmp_path, {"claude-code": "none", "codex": "/x"}) == (HistoryFolder("codex", Path("/x")),)
    assert chosen_folders({}, tmp_path, {"codex": None}) == default_folders({}, tmp_path)
    assert History.find(default_folders({}, tmp_path)).folders == (), "what does not exist is no error"


# --- copies


def said(*texts: str, key: str = "") -> list[Message]:
    roles = ("user", "assistant")
    return [Message(roles[i % 2], text, key=f"{key}{i}" if key else "") for i, text in enumerate(texts)]


def new_texts(*sessions: list[Message]) -> list[list[str]]:
    repeated = Repeated()
    return [[message.text for message, new in repeated.tell(session, "s") if new] for session in sessions]


def test_a_copy_of_the_beginning() -> None:
    assert new_texts(said("a", "b", "c", "d"), said("a", "b", "x", "y")) == [["a", "b", "c", "d"], ["x", "y"]]


def test_the_longer_session_may_come_first_or_last() -> None:
    assert new_texts(said("a", "b", "c", "d"), said("a", "b")) == [["a", "b", "c", "d"], []]
    assert new_texts(said("a", "b"), said("a", "b", "c", "d")) == [["a", "b"], ["c", "d"]]


def test_a_copy_that_begins_in_the_middle_costs_one_message() -> None:
    assert new_texts(said("a", "b", "c", "d", "e"), said("a", "b", "c", "d", "e")[2:] + said("x")) == [list("abcde"), ["c", "x"]]


def test_the_same_words_elsewhere_are_no_copy() -> None:
    assert new_texts(said("hello", "one"), said("hello", "two"), said("start", "yes"), said("begin", "yes")) == [
        ["hello", "one"], ["hello", "two"], ["start", "yes"], ["begin", "yes"],
    ]
    assert new_texts(said("go on", "done", "go on", "done")) == [["go on", "done", "go on", "done"]], "one session may say things twice"
    assert new_texts(said("hello"), said("hello")) == [["hello"], ["hello"]], "nothing more is known of a session of one message"


def test_names_tell_copies_apart_from_the_same_words() -> None:
    assert new_texts(said("hello", key="a"), said("hello", key="a"), said("hello", key="b")) == [["hello"], [], ["hello"]]
    assert new_texts(said("a", "b", key="k"), said("x", "b", key="k")[1:]) == [["a", "b"], []], "a name is known wherever it stands"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=12), st.integers(0, 12), st.lists(st.sampled_from("xyz"), max_size=5))
def test_a_fork_is_read_once_wherever_it_is_cut(old: list[str], cut: int, added: list[str]) -> None:
    """A fork keeps the beginning and goes on differently: only what it adds is new. A beginning of one message says nothing."""
    cut = min(cut, len(old))
    fork = old[:cut] + added
    first, second = new_texts(said(*old), said(*fork))
    assert first == old
    assert second == (added if cut >= 2 else fork)


# --- the order of sessions


def file_of(source: str, project: str, modified: float, name: str = "") -> SessionFile:
    return SessionFile(source, Path(name or f"{source}{project}{modified}"), modified, 1, project)


def test_newest_of_each_project_first() -> None:
    files = [file_of("codex", "a", t) for t in (1, 5, 9)] + [file_of("claude-code", "a", 7), file_of("codex", "b", 8), file_of("codex", "b", 2)]
    order = [(f.source, f.project, f.modified) for f in sample_sessions(files)]
    assert order == [
        ("codex", "a", 9), ("codex", "b", 8), ("claude-code", "a", 7), ("codex", "a", 5), ("codex", "b", 2), ("codex", "a", 1),
    ]


files_strategy = st.lists(
    st.builds(file_of, st.sampled_from(["codex", "claude-code"]), st.sampled_from("abc"), st.integers(0, 5).map(float), st.text("xyz", min_size=1)),
    unique_by=lambda file: (file.source, file.project, file.modified, file.path),
)


@settings(max_examples=60, deadline=None)
@given(files_strategy, st.randoms())
def test_sampling(files: list[SessionFile], rng: Any) -> None:
    order = list(sample_sessions(files))
    assert Counter(order) == Counter(files), "every file once"
    shuffled = list(files)
    rng.shuffle(shuffled)
    assert list(sample_sessions(shuffled)) == order, "the order they come in does not matter"
    groups = {(f.source, f.project) for f in files}
    assert {(f.source, f.project) for f in order[: len(groups)]} == groups, "every project has its turn before any has a second one"
    for group in groups:
        times = [f.modified for f in order if (f.source, f.project) == group]
        assert times == sorted(times, reverse=True), "newest first"


def test_a_session_is_a_plain_value() -> None:
    file = file_of("codex", "a", 1)
    assert replace(file, modified=2.0) != file and hash(file) == hash(replace(file))


@pytest.mark.parametrize("part", ["", *(f".{part}" for part in PARTS)])
def test_importable_alone(part: str) -> None:
    """No library, nothing of the package above it, nothing that uses a network."""
    code = (
        f"import sys, pyspark_moe.history{part}; "
        "bad = {'llama_cpp', 'cffi', 'numpy', 'click', 'socket', 'urllib.request', 'http.client', 'pyspark_moe._native'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    if part in ("", ".corpus", ".claude_code"):  # one interpreter for each costs 50 ms; these import all the others
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (Path(__file__).parents[2] / "pyspark_moe/history" / f"{part[1:] or '__init__'}.py").is_file()
