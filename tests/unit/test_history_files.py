"""Hostile files and folders: whatever lies there, readers end, hold little, raise nothing, and count what they left out."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transcripts
from pyspark_moe.history import SOURCES, History, HistoryFolder, Message, ReadLimits, ReadReport, SessionFile, default_folders
from pyspark_moe.history import lines as history_lines

CLAUDE = {"type": "user", "message": {"role": "user", "content": "hello"}}
CODEX = {"type": "response_item", "payload": {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}}
HELLO = [Message("user", "hello")]
BOTH = pytest.mark.parametrize(("source", "good"), [("claude-code", CLAUDE), ("codex", CODEX)], ids=["claude", "codex"])


def read(path: Path, source: str, limits: ReadLimits = ReadLimits()) -> tuple[list[Message], ReadReport]:
    report = ReadReport()
    file = SessionFile(source, path, 0.0, 0, "p")
    messages = list(SOURCES[source].read(file, limits, report))
    for message in messages:
        message.digest(), message.n_bytes  # can be encoded as UTF-8
    return messages, report


@BOTH
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"\xff\xfe\x00garbage\n", "lines that are not JSON"),
        (b"[1, 2]\n", "lines that are not JSON objects"),
        (b'"text"\n', "lines that are not JSON objects"),
        (b"[" * 10_000 + b"]" * 10_000 + b"\n", "lines that are nested too deeply"),
        (b'{"type":"user","message":' + b'{"content":[' * 10_000 + b"]}" * 10_000 + b"}\n", "lines that are nested too deeply"),
        (b'{"type": ' + b"9" * 5_000 + b"}\n", "lines that are not JSON"),
        (b'{"type": "user"\n', "lines that are not JSON"),
        (b'{"x": "' + b"y" * 5_000_000 + b'"}\n', "lines that are too long"),
    ],
)
def test_a_bad_line_costs_only_itself(tmp_path: Path, source: str, good: dict[str, Any], bad: bytes, reason: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(bad + json.dumps(good).encode() + b"\n")
    messages, report = read(path, source)
    assert messages == HELLO and report.skipped[reason] == 1


@BOTH
def test_a_file_that_is_still_written(tmp_path: Path, source: str, good: dict[str, Any]) -> None:
    path = tmp_path / "s.jsonl"
    line = json.dumps(good).encode()
    path.write_bytes(line + b"\n" + line[:20])
    messages, report = read(path, source)
    assert messages == HELLO and report.skipped["last lines that are cut off"] == 1
    path.write_bytes(line)
    assert read(path, source)[0] == HELLO, "a last line without its end of line is whole"


@BOTH
def test_a_file_that_grows_while_it_is_read_ends(tmp_path: Path, source: str, good: dict[str, Any]) -> None:
    path = tmp_path / "s.jsonl"
    line = json.dumps(good) + "\n"
    path.write_text(line * 3)
    n = 0
    for _ in SOURCES[source].read(SessionFile(source, path, 0.0, 0, "p")):
        n += 1
        with path.open("a") as more:
            more.write(line * 5)
    assert n == 3


@BOTH
def test_a_byte_order_mark_and_invalid_utf8_inside_a_text(tmp_path: Path, source: str, good: dict[str, Any]) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(good).encode().replace(b"hello", b"hel\xfflo\xed\xa0\x80") + b"\r\n")
    (message,), _ = read(path, source)
    assert message.text.startswith("hel\ufffdlo")


@BOTH
def test_lone_surrogates_and_nul(tmp_path: Path, source: str, good: dict[str, Any]) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(good).replace("hello", r"a\ud83db\udc00c\u0000d\ud83d\ude80"))
    (message,), _ = read(path, source)
    assert message.text == "a\ufffdb\ufffdc\ufffdd🚀"


@BOTH
def test_empty_and_blank_files(tmp_path: Path, source: str, good: dict[str, Any]) -> None:
    path = tmp_path / "s.jsonl"
    for content in (b"", b"\n\n\n", b"\x00" * 5000):
        path.write_bytes(content)
        messages, report = read(path, source)
        assert messages == [] and report.text() == ""


@BOTH
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir(), lambda path: path.symlink_to(path)])
def test_what_is_no_file_is_not_opened(tmp_path: Path, source: str, good: dict[str, Any], make: Callable[[Path], None]) -> None:
    """A FIFO would wait for a writer for ever; /dev/zero has no end."""
    path = tmp_path / "s.jsonl"
    make(path)
    messages, report = read(path, source)
    assert messages == [] and report.skipped["files that cannot be read"] == 1


@pytest.mark.timeout(20)
def test_a_fifo_that_takes_a_files_place_behind_our_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the opening; without care the opening would wait for a writer."""
    path, file = tmp_path / "s.jsonl", tmp_path / "file"
    file.write_text("x")
    os.mkfifo(path)
    regular = os.stat(file)
    monkeypatch.setattr(history_lines.os, "stat", lambda path: regular)
    with pytest.raises(OSError, match="not a regular file"):
        history_lines.open_regular(path)


@pytest.mark.parametrize("kind", ["many lines", "one line of 100 MB", "a line that never ends"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.jsonl"
    if kind == "many lines":
        content = (json.dumps({"type": "summary", "summary": "s" * 1000}) + "\n").encode() * 12_000
    else:
        content = b'{"x": "' + (b"y" * 100_000_000 + b'"}\n' if kind == "one line of 100 MB" else b"y" * 20_000_000)
    path.write_bytes(content + json.dumps(CLAUDE).encode() + b"\n")
    file = SessionFile("claude-code", path, 0.0, 0, "p")
    del content
    tracemalloc.start()
    list(SOURCES["claude-code"].read(file, ReadLimits(max_line_bytes=1 << 20)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20, f"{peak} bytes"


def test_a_scan_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes((json.dumps(CLAUDE) + "\n").encode() * 1000)
    messages, report = read(path, "claude-code", ReadLimits(max_scan_bytes=1000))
    assert 0 < len(messages) < 20 and report.skipped["ends of files that are too long"] == 1


ODD = [None, True, 0, -1.5, 1e308, "", "x", [], {}, [[]], [None], {"type": 1}, {"text": 2}, [{"type": "text"}], [{"type": []}], "\ud800", {"content": {}}]


@pytest.mark.parametrize("source", list(SOURCES))
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_any_field_may_be_anything(tmp_path: Path, source: str, odd: Any) -> None:
    """Every field of every entry that the agents write, replaced one at a time; the next line is read all the same."""
    home = tmp_path / "h"
    written = transcripts.write_history(home, n_projects=1, n_sessions=1, n_turns=1)
    good = CLAUDE if source == "claude-code" else CODEX
    originals = (written.claude_code if source == "claude-code" else written.codex)[-1]
    lines = []
    for line in originals.read_text().splitlines():
        for path in _paths(json.loads(line)):
            value = json.loads(line)
            _replace(value, path, odd)
            lines.append(json.dumps(value))
    path = tmp_path / "s.jsonl"
    path.write_text("\n".join([*lines, json.dumps(good)]) + "\n")
    messages, _ = read(path, source)
    assert HELLO[0] in messages
    assert all(m.role in ("user", "assistant", "tool") and isinstance(m.text, str) for m in messages)
    for call in (call for m in messages for call in m.tool_calls):
        assert isinstance(json.loads(call.arguments), dict)


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in items for path in ((*at, key), *_paths(item, (*at, key)))]


def _replace(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def hostile_folder(folder: Path, name: str, good: dict[str, Any]) -> None:
    transcripts.write_lines(folder / "a" / f"{name}good.jsonl", [good])
    (folder / "a" / f"{name}dangling.jsonl").symlink_to(folder / "nowhere")
    (folder / "a" / f"{name}itself.jsonl").symlink_to(folder / "a" / f"{name}itself.jsonl")
    (folder / "a" / f"{name}second.jsonl").symlink_to(folder / "a" / f"{name}good.jsonl")
    (folder / "a" / f"{name}device.jsonl").symlink_to("/dev/zero")
    os.mkfifo(folder / "a" / f"{name}fifo.jsonl")
    (folder / "a" / f"{name}folder.jsonl").mkdir()
    (folder / "a" / "loop").symlink_to(folder)
    (folder / "a" / "out").symlink_to("/")
    (folder / "b").mkdir()
    transcripts.write_lines(folder / "b" / f"{name}unreadable.jsonl", [good])
    (folder / "b" / f"{name}unreadable.jsonl").chmod(0)
    transcripts.write_lines(folder / "c" / f"{name}hidden.jsonl", [good])
    (folder / "c").chmod(0)
    transcripts.write_lines(Path(folder, "d" * 200, *["e"] * 20, f"{name}deep.jsonl"), [good])
    raw = os.fsencode(folder) + b"/a/" + name.encode() + b"\xff\xfe.jsonl"
    with open(raw, "w") as file:
        file.write(json.dumps(good) + "\n")


@BOTH
def test_a_hostile_folder(tmp_path: Path, source: str, good: dict[str, Any]) -> None:
    folder = tmp_path / "history"
    hostile_folder(folder, "rollout-", good)
    history = History.find([HistoryFolder(source, folder)])
    as_root = os.geteuid() == 0  # for whom nothing is unreadable
    (folder / "c").chmod(0o700)
    names = sorted(os.fsencode(file.path.name) for file in history.sessions)
    expected = [b"rollout-\xff\xfe.jsonl", b"rollout-good.jsonl", b"rollout-unreadable.jsonl"] + ([b"rollout-hidden.jsonl"] if as_root else [])
    assert names == sorted(expected)
    conversations = list(history.conversations())
    assert len(conversations) == (4 if as_root else 2), history.report.text()
    for reason in ("links to folders", "dangling links or unreadable files", "second names of a file", "things that are not files"):
        assert history.report.skipped[reason], history.report.text()
    for session in history.sessions:
        str(session.session).encode(), session.project.encode()


@pytest.mark.parametrize("what", ["nothing", "a file", "a loop", "not allowed"])
def test_a_root_that_is_no_folder(tmp_path: Path, what: str) -> None:
    root = tmp_path / "projects"
    if what == "a file":
        root.write_text("x")
    elif what == "a loop":
        root.symlink_to(root)
    elif what == "not allowed":
        root.mkdir(0)
    for source in SOURCES:
        history = History.find([HistoryFolder(source, root)])
        assert history.sessions == () and list(history.conversations()) == []


def test_a_root_that_is_a_link_is_followed(tmp_path: Path) -> None:
    transcripts.write_lines(tmp_path / "real/p/s.jsonl", [CLAUDE])
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folders = [HistoryFolder("claude-code", tmp_path / name) for name in ("link", "real", "link")]
    history = History.find(folders)
    assert len(history.folders) == len(history.sessions) == 1, "two names of one folder count once"


def test_too_many_entries_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(30):
        transcripts.write_lines(tmp_path / f"p{i}/s.jsonl", [CLAUDE])
    monkeypatch.setattr(history_lines, "MAX_ENTRIES", 45)
    history = History.find([HistoryFolder("claude-code", tmp_path)])
    assert 0 < len(history.sessions) < 30 and history.report.skipped["folders with too many entries"] == 1


def test_a_file_that_goes_away_before_it_is_read(tmp_path: Path) -> None:
    written = transcripts.write_history(tmp_path, n_projects=1)
    history = History.find(default_folders({}, tmp_path))
    for path in written.codex:
        path.unlink()
    os.mkfifo(written.codex[0])
    list(history.conversations())
    assert history.report.skipped["files that cannot be read"] == len(written.codex)
