"""Codex's transcripts: <CODEX_HOME>/sessions/YYYY/MM/DD/rollout-<time>-<id>.jsonl.

Since autumn 2025 a line is {timestamp, type, payload}: response_item holds what the model read and wrote, in the form of
OpenAI's Responses API; event_msg says most of it again, for the screen, and is not read, except for the open thoughts of
models that Codex keeps nowhere else. Before that a line was the item itself. A forked session, and an agent that a session
starts, begin with a copy of the older items. docs/guide/history.md says what is left out.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .base import CODEX, Message, ReadLimits, ReadReport, SessionFile, ToolCall
from .lines import read_objects, walk
from .text import arguments, block_texts, clean, string

# Parts of a user's message that Codex writes itself: how each begins, and how it ends.
_CONTEXT_TAGS = (
    "environment_context", "user_instructions", "skill", "skills_instructions", "turn_aborted", "subagent_notification",
    "extension_context", "goal_context", "additional_context", "hook_prompt", "plugins", "plugins_instructions", "recommended_plugins",
    "apps_instructions", "app-context", "permissions instructions", "collaboration_mode", "multi_agent_mode", "model_switch",
    "personality_spec", "realtime_conversation", "environments_instructions", "token_budget", "token_budget_reminder", "context_window",
    "context_window_guidance", "rollout_budget",
)


def _any_case(start: str, end: str) -> tuple[re.Pattern[str], re.Pattern[str] | None]:
    return re.compile(start, re.IGNORECASE), re.compile(end, re.IGNORECASE) if end else None


_CONTEXT = tuple(_any_case(rf"<{tag}[\s>]", rf"</{tag.split()[0]}[^>]{{0,40}}>") for tag in _CONTEXT_TAGS) + (
    _any_case("# AGENTS\\.md instructions", "</INSTRUCTIONS>"),
    _any_case("These AGENTS\\.md instructions replace", "</INSTRUCTIONS>"),
    _any_case("The previously provided AGENTS\\.md instructions no longer apply", ""),
    _any_case("Warning: The maximum number of unified exec processes", ""),
    _any_case("Warning: apply_patch was requested via", ""),
)
_NOTHING = re.compile("")
_REQUEST = "## My request for Codex:"  # the editor's extension puts open files before it
_EDITOR = "# Context from my IDE setup"
_CWD = re.compile(r"<cwd>([^<\n]{1,4096})</cwd>")
_REMEMBERED = 4096  # ids of recent calls
_HEADER_BYTES = 1 << 20


class Codex:
    """Reader of Codex's transcripts; a `HistorySource`."""

    name = CODEX

    def folder(self, environment: Mapping[str, str], home: Path) -> Path:
        """CODEX_HOME or ~/.codex, and its sessions."""
        chosen = environment.get("CODEX_HOME")
        return (Path(chosen) if chosen else home / ".codex") / "sessions"

    def find(self, folder: Path, report: ReadReport | None = None) -> Iterator[SessionFile]:
        """Opens each file for its first lines, which say where Codex worked. Files that Codex has packed (.jsonl.zst) are
        counted and not read: Python has no reader for them before 3.14."""
        report = report or ReadReport()
        root = folder / "sessions" if os.path.isdir(folder / "sessions") else folder
        for path, status in walk(root, lambda name: name.startswith("rollout-"), lambda name: True, report):
            if path.name.endswith(".jsonl.zst"):
                report.skip("packed sessions (.jsonl.zst)")
            elif path.name.endswith(".jsonl"):
                session = path.stem.encode("utf-8", "replace").decode()
                yield SessionFile(self.name, path, status.st_mtime, status.st_size, _project(path), session)

    def read(self, file: SessionFile, limits: ReadLimits = ReadLimits(), report: ReadReport | None = None) -> Iterator[Message]:
        """See HistorySource.read. Thoughts, text and calls that follow one another are one message."""
        report = report or ReadReport()
        reading = _Reading(limits, report)
        n_bytes = 0
        for line in read_objects(file.path, limits, report):
            for message in reading.line(line):
                n_bytes += message.n_bytes
                yield message
            if n_bytes > limits.max_session_bytes:
                report.skip("ends of sessions that are too long")
                return
        yield from reading.flush()


def _project(path: Path) -> str:
    """The working directory in a file's first lines, "" when they do not say."""
    limits = ReadLimits(max_line_bytes=_HEADER_BYTES, max_scan_bytes=_HEADER_BYTES)
    for n, line in enumerate(read_objects(path, limits, ReadReport())):
        payload = line.get("payload")
        for part in (payload, line):
            if isinstance(part, dict) and isinstance(part.get("cwd"), str) and part["cwd"]:
                return clean(part["cwd"], 4096, ReadReport())
        item = payload if isinstance(payload, dict) else line
        found = _CWD.search("\n".join(block_texts(item.get("content"), ReadReport())))
        if found:
            return clean(found[1], 4096, ReadReport())
        if n >= 8:
            break
    return ""


class _Reading:
    """Lines in, messages out, for one file. Holds one answer and the latest ids."""

    def __init__(self, limits: ReadLimits, report: ReadReport) -> None:
        self.limits, self.report = limits, report
        self.texts: list[str] = []
        self.thinking: list[str] = []
        self.calls: list[ToolCall] = []
        self.names: OrderedDict[str, str] = OrderedDict()  # id of a call -> name of the tool

    def line(self, line: dict[str, Any]) -> Iterator[Message]:
        kind, payload = line.get("type"), line.get("payload")
        if kind == "response_item" and isinstance(payload, dict):
            yield from self._item(payload)
        elif kind == "event_msg" and isinstance(payload, dict):
            if payload.get("type") == "agent_reasoning_raw_content":
                yield from self._think([payload.get("text")])
            else:
                self.report.skip("events for the screen")
        elif kind == "compacted":
            self.report.skip("summaries of what is there already")
        elif "payload" not in line and isinstance(kind, str) and kind not in ("session_meta", "turn_context"):
            yield from self._item(line)
        else:
            self.report.skip("entries of the program itself")

    def flush(self) -> Iterator[Message]:
        """The answer that was waiting for more items."""
        limit = self.limits.max_message_bytes
        text, thinking = (clean("\n\n".join(parts), limit, self.report).strip() for parts in (self.texts, self.thinking))
        calls = tuple(self.calls)
        self.texts, self.thinking, self.calls = [], [], []
        if text or thinking or calls:
            key = f"call {calls[0].call_id}" if calls and calls[0].call_id else ""
            yield self._count(Message("assistant", text, thinking, calls, key=key))

    def _count(self, message: Message) -> Message:
        self.report.n_messages += 1
        self.report.n_bytes += message.n_bytes
        return message

    def _item(self, item: dict[str, Any]) -> Iterator[Message]:
        kind = item.get("type")
        kind = kind if isinstance(kind, str) else ""
        if kind == "message":
            yield from self._message(item)
        elif kind == "agent_message":  # from one agent to another
            yield from self._typed(item.get("content"))
        elif kind == "reasoning":
            open_text = block_texts(item.get("content"), self.report)
            if isinstance(item.get("encrypted_content"), str):
                self.report.skip("encrypted thoughts")
            yield from self._think(open_text or block_texts(item.get("summary"), self.report))
        elif kind == "function_call":
            yield from self._call(item, item.get("name"), item.get("arguments"))
        elif kind == "custom_tool_call":
            yield from self._call(item, item.get("name"), item.get("input"))
        elif kind == "local_shell_call":
            yield from self._call(item, "local_shell", item.get("action"))
        elif kind == "web_search_call":
            yield from self._call(item, "web_search", item.get("action"))
        elif kind == "tool_search_call":
            yield from self._call(item, "tool_search", item.get("arguments"))
        elif kind in ("function_call_output", "custom_tool_call_output", "mcp_tool_call_output", "local_shell_call_output"):
            yield from self._result(item)
        elif kind == "image_generation_call":
            self.report.skip("images")
        else:
            self.report.skip("entries of the program itself")

    def _message(self, item: dict[str, Any]) -> Iterator[Message]:
        role = item.get("role")
        if role == "assistant":
            if self.calls:  # text after calls is a new step
                yield from self.flush()
            self._add(self.texts, block_texts(item.get("content"), self.report))
        elif role == "user":
            yield from self._typed(item.get("content"))
        else:
            self.report.skip("messages of the system" if role in ("system", "developer") else "messages of unknown roles")

    def _typed(self, content: Any) -> Iterator[Message]:
        yield from self.flush()
        kept = [self._without_context(text) for text in block_texts(content, self.report)]
        text = clean("\n\n".join(part for part in kept if part), self.limits.max_message_bytes, self.report).strip()
        if text:
            yield self._count(Message("user", text))

    def _without_context(self, text: str) -> str:
        """A part of a user's message without what Codex put before the words; "" when there is nothing else."""
        text = text.strip()
        for _ in range(len(_CONTEXT)):
            closing = next((closing for opening, closing in _CONTEXT if opening.match(text)), _NOTHING)
            if closing is _NOTHING:
                break
            self.report.skip("inserted texts")
            end = closing.search(text) if closing else None
            text = text[end.end() :].strip() if end else ""
        if text.startswith(_EDITOR) and _REQUEST in text:
            self.report.skip("inserted texts")
            text = text.partition(_REQUEST)[2].strip()
        if text in ("<image>", "</image>") or re.fullmatch(r"<image name=[^>]{0,200}>", text):
            return ""
        return text

    def _think(self, texts: list[Any]) -> Iterator[Message]:
        if self.texts or self.calls:  # thoughts after an answer begin a new step
            yield from self.flush()
        self._add(self.thinking, texts)

    def _add(self, parts: list[str], texts: list[Any]) -> None:
        for text in texts:
            if not isinstance(text, str):
                self.report.skip("blocks of unknown kinds")
            elif len(parts) >= 1000 or sum(map(len, parts)) > self.limits.max_message_bytes:
                self.report.skip("blocks beyond the limit")
            elif text and text not in parts[-4:]:  # an event that says it again
                parts.append(text[: self.limits.max_message_bytes])

    def _call(self, item: dict[str, Any], name: Any, sent: Any) -> Iterator[Message]:
        name, call_id = string(name), string(item.get("call_id")) or string(item.get("id"))
        if not name:
            self.report.skip("calls without a name")
            return
        if len(self.calls) >= self.limits.max_calls:
            yield from self.flush()
        self.calls.append(ToolCall(name, arguments(sent, self.limits.max_message_bytes, self.report), call_id))
        if call_id:
            self.names[call_id] = name
            if len(self.names) > _REMEMBERED:
                self.names.popitem(last=False)

    def _result(self, item: dict[str, Any]) -> Iterator[Message]:
        yield from self.flush()
        call_id = string(item.get("call_id"))
        output = item.get("output", item.get("result"))
        if isinstance(output, dict) and not isinstance(output.get("content"), (str, list)):
            output = output.get("Ok", output.get("Err", output.get("output")))  # of an MCP server, as Rust writes it
        text = "\n".join(_unwrap(part) for part in block_texts(output, self.report))
        text = clean(text, self.limits.max_message_bytes, self.report).strip()
        key = f"result {call_id}" if call_id else ""
        yield self._count(Message("tool", text, call_id=call_id, name=self.names.get(call_id, ""), key=key))


def _unwrap(text: str) -> str:
    """Until 2026 the output of a command was JSON in a string: {"output": ..., "metadata": ...}."""
    if not text.startswith('{"output":'):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value["output"] if isinstance(value, dict) and isinstance(value.get("output"), str) else text
