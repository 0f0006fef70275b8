"""Codex's transcripts, with and without the envelope of newer versions: what counts, what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transcripts
from pyspark_moe.history import Message, ReadLimits, ReadReport, SessionFile, ToolCall
from pyspark_moe.history.codex import Codex

SOURCE = Codex()


def item(**payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-01T00:00:00Z", "type": "response_item", "payload": payload}


def message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return item(type="message", role=role, content=[{"type": kind, "text": text} for text in texts])


def event(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-01T00:00:00Z", "type": "event_msg", "payload": {"type": kind, **payload}}


def read(tmp_path: Path, *lines: Any, limits: ReadLimits = ReadLimits(), report: ReadReport | None = None) -> list[Message]:
    path = transcripts.write_lines(tmp_path / "rollout-1.jsonl", lines)
    return list(SOURCE.read(SessionFile(SOURCE.name, path, 0.0, path.stat().st_size, "p"), limits, report))


TURN = [
    message("user", "look"),
    event("user_message", message="look"),
    event("agent_reasoning", text="hm"),
    item(type="reasoning", summary=[{"type": "summary_text", "text": "hm"}], encrypted_content="gAAA"),
    message("assistant", "I look."),
    item(type="function_call", name="shell", arguments='{"command":["ls"]}', call_id="call_1"),
    item(type="function_call", name="shell", arguments='{"command":["pwd"]}', call_id="call_2"),
    item(type="function_call_output", call_id="call_1", output="a"),
    item(type="function_call_output", call_id="call_2", output=[{"type": "input_text", "text": "/x"}, {"type": "input_image", "image_url": "data:"}]),
    event("agent_message", message="One file."),
    message("assistant", "One file."),
    event("token_count", info={}),
]
MESSAGES = [
    Message("user", "look"),
    Message("assistant", "I look.", "hm", (ToolCall("shell", '{"command":["ls"]}', "call_1"), ToolCall("shell", '{"command":["pwd"]}', "call_2"))),
    Message("tool", "a", call_id="call_1", name="shell"),
    Message("tool", "/x", call_id="call_2", name="shell"),
    Message("assistant", "One file."),
]


def test_a_turn_and_its_events_count_once(tmp_path: Path) -> None:
    assert read(tmp_path, *TURN) == MESSAGES


def test_the_older_form_without_an_envelope(tmp_path: Path) -> None:
    lines = [line["payload"] for line in TURN if line["type"] == "response_item"]
    meta = {"id": "1", "timestamp": "2025-06-01T00:00:00Z", "instructions": "secret", "git": {}}
    assert read(tmp_path, meta, {"record_type": "state"}, *lines) == MESSAGES


@pytest.mark.parametrize(
    ("payload", "name", "arguments"),
    [
        ({"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin"}, "apply_patch", '{"input": "*** Begin"}'),
        ({"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}}, "local_shell", '{"type": "exec", "command": ["ls"]}'),
        ({"type": "web_search_call", "action": {"type": "search", "query": "q"}}, "web_search", '{"type": "search", "query": "q"}'),
        ({"type": "tool_search_call", "arguments": {"query": "q"}}, "tool_search", '{"query": "q"}'),
        ({"type": "function_call", "name": "f", "arguments": "not json"}, "f", '{"input": "not json"}'),
        ({"type": "function_call", "name": "f", "arguments": '{"a": NaN}'}, "f", json.dumps({"input": '{"a": NaN}'})),
    ],
)
def test_calls_of_every_kind(tmp_path: Path, payload: dict[str, Any], name: str, arguments: str) -> None:
    assert read(tmp_path, item(call_id="c", **payload)) == [Message("assistant", "", tool_calls=(ToolCall(name, arguments, "c"),))]


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"type": "function_call_output", "output": '{"output":"ran\\n","metadata":{"exit_code":0}}'}, "ran"),
        ({"type": "function_call_output", "output": {"content": "old", "success": False}}, "old"),
        ({"type": "custom_tool_call_output", "output": "patched"}, "patched"),
        ({"type": "mcp_tool_call_output", "result": {"Ok": {"content": [{"type": "text", "text": "mcp"}]}}}, "mcp"),
    ],
)
def test_results_of_every_kind(tmp_path: Path, payload: dict[str, Any], expected: str) -> None:
    assert read(tmp_path, item(call_id="c", **payload)) == [Message("tool", expected, call_id="c")]


@pytest.mark.parametrize(
    "line",
    [
        message("developer", "secret"),
        message("system", "secret"),
        message("user", "<environment_context>\n<cwd>/x</cwd>secret</environment_context>"),
        message("user", "<user_instructions>\nsecret\n</user_instructions>"),
        message("user", "# AGENTS.md instructions for /x\n\n<INSTRUCTIONS>\nsecret\n</INSTRUCTIONS>"),
        message("user", "# AGENTS.md instructions for /x\n\n<INSTRUCTIONS>\nsecret\n</INSTRUCTIONS>\n\n<environment_context>secret</environment_context>"),
        message("user", "<ENVIRONMENT_CONTEXT>secret</environment_context>"),
        message("user", "<environment_context>secret and never closed"),
        message("user", "<skill>\n<name>secret</name>\n</skill>"),
        message("user", "<turn_aborted>\nsecret\n</turn_aborted>"),
        message("user", '<hook_prompt hook_run_id="1">secret</hook_prompt>'),
        message("user", "<permissions instructions>secret</permissions instructions>"),
        message("user", "Warning: The maximum number of unified exec processes you can keep open is 60 and secret"),
        {"type": "session_meta", "payload": {"id": "1", "instructions": "secret", "cwd": "/x"}},
        {"type": "turn_context", "payload": {"user_instructions": "secret"}},
        {"type": "compacted", "payload": {"message": "secret", "replacement_history": [message("user", "secret")["payload"]]}},
        {"type": "world_state", "payload": {"text": "secret"}},
        event("user_message", message="secret"),
        event("exec_command_end", stdout="secret"),
        item(type="reasoning", summary=[], encrypted_content="secret"),
        item(type="image_generation_call", id="1", result="secret"),
        item(type="ghost_snapshot", ghost_commit={"id": "secret"}),
        item(type="compaction", encrypted_content="secret"),
        item(type="tool_search_output", tools=[{"description": "secret"}]),
        item(type="message", role="user", content=[{"type": "input_image", "image_url": "data:image/png;base64,secret"}]),
    ],
)
def test_what_is_no_conversation_is_left_out_and_counted(tmp_path: Path, line: dict[str, Any]) -> None:
    report = ReadReport()
    assert read(tmp_path, line, report=report) == []
    assert sum(report.skipped.values()) >= 1, "left out without being counted"
    assert read(tmp_path, line, message("user", "next")) == [Message("user", "next")]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("<environment_context>no</environment_context>", "words"), "words"),
        (("<environment_context>no</environment_context>\n\nwords",), "words"),
        (("İ<environment_context> in the middle",), "İ<environment_context> in the middle"),
        (("<environment_context>İİİ</environment_context>words",), "words"),
        (("<skills> are what I want",), "<skills> are what I want"),
        (("# Context from my IDE setup:\n\n## Active file: x\n\n## My request for Codex:\nwords\n",), "words"),
        (("<user_shell_command><command>ls</command><result>a</result></user_shell_command>",) * 2,
         "\n\n".join(["<user_shell_command><command>ls</command><result>a</result></user_shell_command>"] * 2)),
        (("<image name=[Image #1]>", "</image>", "words"), "words"),
    ],
)
def test_texts_of_users(tmp_path: Path, texts: tuple[str, ...], expected: str) -> None:
    assert read(tmp_path, message("user", *texts)) == [Message("user", expected)]


def test_open_thoughts_are_kept_and_said_once(tmp_path: Path) -> None:
    lines = [
        event("agent_reasoning_raw_content", text="deep"),
        item(type="reasoning", summary=[{"type": "summary_text", "text": "short"}], content=[{"type": "reasoning_text", "text": "deep"}]),
        message("assistant", "yes"),
        item(type="reasoning", summary=[{"type": "summary_text", "text": "again"}]),
        message("assistant", "no"),
    ]
    assert read(tmp_path, *lines) == [Message("assistant", "yes", "deep"), Message("assistant", "no", "again")]


def test_found_files_and_where_codex_worked(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written = transcripts.write_history(home)
    folder = SOURCE.folder({}, home)
    transcripts.write_lines(folder / "2025/rollout-x.jsonl.zst", [])
    transcripts.write_lines(folder / "2025/other.jsonl", [])
    report = ReadReport()
    found = list(SOURCE.find(folder, report))
    assert sorted(file.path for file in found) == sorted(written.codex)
    assert {file.project for file in found} == {f"/srv/dev/project{p}" for p in range(3)}, "also without an envelope"
    assert report.skipped["packed sessions (.jsonl.zst)"] == 1
    assert list(SOURCE.find(home / ".codex")) == found, "the configuration folder itself names the same files"


def test_the_agents_own_rule_for_its_folder(tmp_path: Path) -> None:
    assert SOURCE.folder({}, tmp_path) == tmp_path / ".codex/sessions"
    assert SOURCE.folder({"CODEX_HOME": "/elsewhere"}, tmp_path) == Path("/elsewhere/sessions")
