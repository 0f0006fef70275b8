"""Transcripts that are damaged in any way: lines of any JSON, any field replaced, bytes changed, files cut.

fuzz_transcripts.py looks for the same failures for longer, guided by coverage.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import transcript_checks
import transcripts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LIMITS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SOURCES = pytest.mark.parametrize("source", ["claude-code", "codex"])

WORDS = (
    "user", "assistant", "tool", "system", "message", "content", "text", "type", "thinking", "tool_use", "tool_result", "response_item", "payload",
    "input_text", "output_text", "function_call", "function_call_output", "reasoning", "summary", "image", "<system-reminder>", "</system-reminder>",
    "<environment_context>", "</environment_context>", "data:image/png;base64,AAAA", "\ud800", "\x00", "ü🚀", "x" * 2000, "QUJD" * 400,
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(WORDS), st.text(max_size=10))
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4), max_leaves=12)


@cache
def lines_of(source: str) -> list[Any]:
    """Everything the agents write, as JSON values."""
    with TemporaryDirectory() as home:
        written = transcripts.write_history(Path(home), n_projects=1, n_sessions=2, n_turns=1)
        files = written.codex if source == "codex" else written.claude_code
        return [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]


def nodes(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in items for path in ((*at, key), *nodes(item, (*at, key)))]


def replaced(line: Any, where: int, new: Any) -> Any:
    """A line with one of its values replaced; `where` may be any number."""
    line = json.loads(json.dumps(line))
    paths = nodes(line)
    path = paths[where % len(paths)]
    place = line
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return line


edits = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000), values), min_size=1, max_size=8)
damages = st.lists(st.tuples(st.floats(0, 0.999), st.sampled_from(["byte", "cut", "insert", "newline"]), st.integers(0, 255)), max_size=4)


@SOURCES
@LIMITS
@given(edits=edits, damages=damages)
def test_damaged_transcripts(source: str, edits: list[tuple[int, int, Any]], damages: list[tuple[float, str, int]]) -> None:
    lines = list(lines_of(source))
    for line, where, new in edits:
        lines[line % len(lines)] = replaced(lines[line % len(lines)], where, new)
    data = bytearray(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    for at, kind, value in damages:
        i = int(at * len(data))
        if kind == "byte":
            data[i : i + 1] = bytes([value])
        elif kind == "cut":
            del data[i:]
        else:
            data[i:i] = bytes([value]) * 3 if kind == "insert" else b"\n"
    with TemporaryDirectory() as folder:
        transcript_checks.check_transcript(bytes(data), source, Path(folder))


@SOURCES
@LIMITS
@given(lines=st.lists(values, max_size=6))
def test_lines_of_any_json(source: str, lines: list[Any]) -> None:
    with TemporaryDirectory() as folder:
        transcript_checks.check_transcript("\n".join(map(json.dumps, lines)).encode(), source, Path(folder))


@SOURCES
@LIMITS
@given(data=st.binary(max_size=300))
def test_any_bytes(source: str, data: bytes) -> None:
    with TemporaryDirectory() as folder:
        transcript_checks.check_transcript(data, source, Path(folder))
        transcript_checks.check_corpus(data, Path(folder))


@LIMITS
@given(messages=st.lists(values, max_size=3), other=values)
def test_any_corpus(messages: list[Any], other: Any) -> None:
    good = {"role": "user", "content": "x"}
    lines = [{"source": "codex", "messages": [good, *messages]}, {"source": other, "messages": [{**good, "tool_calls": other}]}, other]
    for line in lines:
        with TemporaryDirectory() as folder:
            transcript_checks.check_corpus(json.dumps(line).encode() + b"\n", Path(folder))


@SOURCES
def test_the_undamaged_lines_are_read(source: str, tmp_path: Path) -> None:
    """The starting point of the tests above means something."""
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines_of(source))
    conversations = transcript_checks.check_transcript(data, source, tmp_path)
    assert sum(len(conversation.messages) for conversation in conversations) >= 8
