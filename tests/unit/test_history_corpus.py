"""Corpora: what is written is read back, damage is an error that says where, files are private and appear whole."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transcripts
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_moe import errors
from pyspark_moe.history import Conversation, History, Message, SessionFile, ToolCall, corpus, default_folders
from pyspark_moe.history.corpus import CorpusWriter, is_held_out, read_corpus, write_corpus, write_split
from pyspark_moe.tools.extract import extract

SESSION = SessionFile("codex", Path("s.jsonl"), 0.0, 0, "/srv/p", "s")


def conversation(*messages: Message, family: str = "f") -> Conversation:
    return Conversation(SESSION, messages, family=family)


def same(a: Conversation, b: Conversation) -> bool:
    names = [(c.session.source, c.session.project, c.session.session, c.thread, c.family, c.messages) for c in (a, b)]
    return names[0] == names[1]


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
calls = st.builds(ToolCall, text, text, text)
messages = st.one_of(
    st.builds(Message, st.just("user"), text),
    st.builds(Message, st.just("assistant"), text, text, st.lists(calls, max_size=3).map(tuple)),
    st.builds(Message, st.just("tool"), text, call_id=text, name=text),
)
conversations = st.lists(st.lists(messages, min_size=1, max_size=5).map(lambda ms: conversation(*ms)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(written=conversations)
def test_round_trip(written: list[Conversation], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    assert write_corpus(path, written) == len(written)
    read = list(read_corpus(path))
    assert len(read) == len(written) and all(map(same, read, written))


def test_the_form_is_openais(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    call = ToolCall("Bash", '{"command": "ls"}', "c1")
    write_corpus(path, [conversation(Message("user", "ü"), Message("assistant", "", "hm", (call,)), Message("tool", "a", call_id="c1", name="Bash"))])
    assert json.loads(path.read_text(encoding="utf-8"))["messages"] == [
        {"role": "user", "content": "ü"},
        {"role": "assistant", "content": "", "reasoning_content": "hm",
         "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "Bash", "arguments": '{"command": "ls"}'}}]},
        {"role": "tool", "content": "a", "tool_call_id": "c1", "name": "Bash"},
    ]


def test_a_conversation_too_long_for_a_line_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 1000)
    said = tuple(Message("user", f"{i}" * 100) for i in range(10))
    path = tmp_path / "c.jsonl"
    assert write_corpus(path, [conversation(*said)]) > 1
    assert tuple(m for c in read_corpus(path) for m in c.messages) == said


GOOD = b'{"source":"codex","messages":[{"role":"user","content":"x"}]}\n'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (GOOD[:-1], "cut off"),
        (GOOD[:30], "cut off"),
        (b"not json\n", "not JSON"),
        (b"[]\n", "no list of messages"),
        (b'{"messages":[]}\n', "no list of messages"),
        (b'{"messages":["x"]}\n', "role"),
        (b'{"messages":[{"role":"system","content":"x"}]}\n', "role"),
        (b'{"messages":[{"role":["user"],"content":"x"}]}\n', "role"),
        (b'{"messages":[{"role":"user","content":1}]}\n', "content that is no text"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}\n', "half a character"),
        (b'{"messages":[{"role":"user","content":"x","tool_calls":{}}]}\n', "tool_calls"),
        (b'{"messages":[{"role":"user","content":"x","tool_calls":[1]}]}\n', "function"),
        (b'{"source":1,"messages":[{"role":"user","content":"x"}]}\n', "source that is no text"),
        (b"\xff\n", "not UTF-8"),
        (b"\n", "not JSON"),
        (b"[" * 10_000 + b"\n", "nested too deeply|recursion"),
    ],
)
def test_damage_is_an_error_that_says_where(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(GOOD + line)
    reading = read_corpus(path)
    assert next(reading).messages == (Message("user", "x"),)
    with pytest.raises(errors.CorpusError, match=rf"line 2: .*({reason}).*extract"):
        next(reading)


def test_a_line_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"x" * 100_000)
    with pytest.raises(errors.CorpusError, match="line 1: longer than"):
        list(read_corpus(path))


@pytest.mark.parametrize("what", ["missing", "folder"])
def test_what_is_no_file(tmp_path: Path, what: str) -> None:
    with pytest.raises(errors.CorpusError, match="cannot be read"):
        list(read_corpus(tmp_path / "missing" if what == "missing" else tmp_path))


def test_nothing_is_left_after_an_error_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"

    def broken() -> Iterator[Conversation]:
        yield conversation(Message("user", "x"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_corpus(path, broken())
    assert list(tmp_path.iterdir()) == []
    path.write_text("mine")
    with pytest.raises(errors.ConfigError, match="--force"):
        write_corpus(path, [])
    with pytest.raises(KeyboardInterrupt):
        write_corpus(path, broken(), replace=True)
    assert path.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    write_corpus(path, [], replace=True)
    assert path.read_text() == ""


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    with pytest.raises(errors.ConfigError, match="exists"), CorpusWriter(path):
        path.write_text("mine")
    assert path.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.CorpusError, match="cannot be written: No space left"):
        write_corpus(tmp_path / "c.jsonl", [conversation(Message("user", "x"))])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(errors.CorpusError, match="cannot be written"):
        write_corpus(tmp_path / "nowhere/c.jsonl", [])


# --- the split


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan"), float("inf")])
def test_fractions_that_leave_a_side_empty_are_refused(fraction: float) -> None:
    with pytest.raises(errors.ConfigError, match="between 0 and 1"):
        is_held_out("f", fraction)


def test_the_split_is_stable_and_near_its_fraction() -> None:
    families = [f"family {i}" for i in range(4000)]
    held_out = {f for f in families if is_held_out(f, 0.2)}
    assert 0.17 < len(held_out) / len(families) < 0.23
    assert {f for f in families if is_held_out(f, 0.1)} < held_out, "a larger fraction keeps what a smaller one held out"
    assert sorted(f for f in families[:20] if is_held_out(f, 0.2)) == ["family 18", "family 2", "family 4", "family 6", "family 9"], (
        "the split is part of what a corpus means: never change it"
    )


def test_no_family_is_on_both_sides(tmp_path: Path) -> None:
    written = transcripts.write_history(tmp_path / "home")
    found = History.find(default_folders({}, tmp_path / "home"))
    split = write_split(tmp_path, found.conversations(), 0.4, max_sessions=1000, max_bytes=1 << 30)
    train, held_out = (list(read_corpus(path)) for path in (split.train, split.held_out))
    assert (len(train), len(held_out)) == (split.n_train, split.n_held_out) and train and held_out
    assert not {c.family for c in train} & {c.family for c in held_out}
    assert sum(c.n_bytes for c in train) == split.train_bytes
    text = split.train.read_text(encoding="utf-8") + split.held_out.read_text(encoding="utf-8")
    assert all(json.dumps(part, ensure_ascii=False) in text for part in written.texts)


def test_limits_of_a_split(tmp_path: Path) -> None:
    transcripts.write_history(tmp_path / "home")

    def run(name: str, **limits: Any) -> list[Conversation]:
        (tmp_path / name).mkdir()
        found = History.find(default_folders({}, tmp_path / "home"))
        split = write_split(tmp_path / name, found.conversations(), 0.5, **limits)
        return [*read_corpus(split.train), *read_corpus(split.held_out)]

    assert len({c.session.session for c in run("a", max_sessions=3, max_bytes=1 << 30)}) == 3
    assert 3_000 < sum(c.n_bytes for c in run("b", max_sessions=100, max_bytes=8_000)) <= 8_000


# --- the command


@pytest.fixture
def keep_handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(extract, list(arguments))


def test_extract(own_home: Path, tmp_path: Path, keep_handlers: None) -> None:
    transcripts.write_history(own_home)
    out = tmp_path / "new/out"
    result = run("--out", str(out), "--test-fraction", "0.3")
    assert result.exit_code == 0, result.output
    assert "27 sessions" in result.output and "messages that were read before" in result.output
    assert sorted(path.name for path in out.iterdir()) == ["heldout.jsonl", "train.jsonl"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in out.iterdir()) and stat.S_IMODE(out.stat().st_mode) == 0o700
    before = [path.read_bytes() for path in sorted(out.iterdir())]
    assert isinstance(run("--out", str(out)).exception, errors.ConfigError)
    assert run("--out", str(out), "--test-fraction", "0.3", "--force").exit_code == 0
    assert [path.read_bytes() for path in sorted(out.iterdir())] == before, "the same history gives the same bytes"


def test_extract_from_chosen_folders(own_home: Path, tmp_path: Path, keep_handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    transcripts.write_history(tmp_path / "other", n_projects=1)
    result = run("--out", str(tmp_path / "a"), "--claude-code", "none", "--codex", str(tmp_path / "other/.codex"))
    assert result.exit_code == 0 and "4 sessions" in result.output, result.output
    assert ".claude" not in result.output
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "other/.claude"))
    result = run("--out", str(tmp_path / "b"))
    assert result.exit_code == 0 and "5 sessions" in result.output, result.output


@pytest.mark.parametrize(
    ("arguments", "kind", "reason"),
    [
        (["--test-fraction", "1"], errors.ConfigError, "between 0 and 1"),
        (["--test-fraction", "nan"], errors.ConfigError, "between 0 and 1"),
        (["--codex", "none", "--claude-code", "none"], errors.HistoryError, "turned off"),
        (["--codex", "missing"], errors.HistoryError, "missing is not a folder"),
        ([], errors.HistoryError, "No session"),
    ],
)
def test_extract_refuses(tmp_path: Path, keep_handlers: None, arguments: list[str], kind: type[Exception], reason: str) -> None:
    result = run("--out", str(tmp_path / "out"), *arguments)
    assert isinstance(result.exception, kind) and reason in str(result.exception)
    assert not (tmp_path / "out").exists(), "nothing is made before it is known that something is there"
