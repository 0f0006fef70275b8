"""Folders of transcripts as Claude Code and Codex write them, made of text that is made up here.

`write_history(home)` makes both agents' folders: several projects, sessions over weeks, tool calls and their results, thoughts,
images, sidechains, resumed and forked sessions, the boilerplate that readers leave out, entries of the programs themselves.
Everything follows from the seed. What a reader must find is in `Written`; `BOILERPLATE` occurs only where it must not be read.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOILERPLATE = "boilerplate-that-is-never-read"
IMAGE = "iVBORw0KGgo" + "QUJD" * 500
START = 1_760_000_000.0  # autumn 2025
DAY = 86_400.0

_NOUNS = ("parser", "cache", "scheduler", "socket", "migration", "tokenizer", "allocator", "renderer", "queue", "index")
_VERBS = ("fix", "simplify", "measure", "document", "rewrite", "test", "profile", "split", "rename", "extend")
_FILES = ("src/main.py", "src/cache.rs", "lib/queue.go", "app/index.ts", "core/alloc.c", "tests/test_api.py")


@dataclass
class Written:
    """What was written: files by agent, and every text that belongs to a conversation, once."""

    claude_code: list[Path] = field(default_factory=list)
    codex: list[Path] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass
class Turn:
    """One exchange: what is asked, thought, called, answered by the tool, and said."""

    prompt: str
    thinking: str
    tool: str
    arguments: dict[str, Any]
    output: str
    answer: str

    @property
    def texts(self) -> list[str]:
        return [self.prompt, self.thinking, self.output, self.answer]


class Text:
    """Sentences and code about one topic, never the same twice."""

    def __init__(self, rng: random.Random, topic: str) -> None:
        self.rng, self.topic, self.n = rng, topic, 0

    def mark(self) -> str:
        self.n += 1
        return f"{self.topic}-{self.n}"

    def sentence(self) -> str:
        return f"{self.rng.choice(_VERBS)} the {self.rng.choice(_NOUNS)} of {self.mark()} before the {self.rng.choice(_NOUNS)}"

    def code(self, lines: int) -> str:
        name = self.mark().replace("-", "_")
        body = "\n".join(f"    {self.rng.choice(_NOUNS)}_{i} = {self.rng.choice(_VERBS)}({self.rng.randrange(999)})" for i in range(lines))
        return f"def {name}(x):\n{body}\n    return x"

    def turn(self, lines: int = 6) -> Turn:
        path = self.rng.choice(_FILES)
        return Turn(
            f"Please {self.sentence()} in {path}. Grüße, 你好 🚀", f"I should {self.sentence()} first.", "Read", {"file_path": path, "limit": lines},
            self.code(lines), f"Done: I could {self.sentence()}.\n\n```python\n{self.code(2)}\n```",
        )


def write_lines(path: Path, lines: Iterable[Any], modified: float | None = None) -> Path:
    """Each value as a line of JSON; `modified` sets the file's time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if modified is not None:
        os.utime(path, (modified, modified))
    return path


class ClaudeSession:
    """Entries of one of Claude Code's sessions, chained by uuid as the program does."""

    def __init__(self, rng: random.Random, session: str, cwd: str, agent: str = "") -> None:
        self.rng, self.session, self.cwd, self.agent = rng, session, cwd, agent
        self.entries: list[dict[str, Any]] = []
        self.parent: str | None = None
        self.n = 0

    def id(self, prefix: str) -> str:
        return f"{prefix}{self.rng.getrandbits(64):016x}"

    def add(self, kind: str, message: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        self.n += 1
        entry: dict[str, Any] = {
            "parentUuid": self.parent, "isSidechain": bool(self.agent), "userType": "external", "cwd": self.cwd, "sessionId": self.session,
            "version": "2.1.0", "gitBranch": "main", "type": kind, "uuid": self.id(""), "timestamp": f"2025-11-{1 + self.n % 28:02d}T10:00:00.000Z",
        }
        if self.agent:
            entry["agentId"] = self.agent
        if message is not None:
            entry["message"] = message
        entry.update(more)
        self.parent = str(entry["uuid"])
        self.entries.append(entry)
        return entry

    def user(self, content: Any, **more: Any) -> None:
        self.add("user", {"role": "user", "content": content}, **more)

    def assistant(self, blocks: Sequence[dict[str, Any]]) -> None:
        """One answer: an entry for each block, all with the same message.id."""
        message_id = self.id("msg_")
        for i, block in enumerate(blocks):
            message = {
                "id": message_id, "type": "message", "role": "assistant", "model": "claude-sonnet-4-5", "content": [block],
                "stop_reason": "end_turn" if i == len(blocks) - 1 else None, "usage": {"input_tokens": 10, "output_tokens": 20},
            }
            self.add("assistant", message, requestId=self.id("req_"))

    def turn(self, turn: Turn) -> None:
        call = self.id("toolu_")
        self.user(turn.prompt)
        thinking = {"type": "thinking", "thinking": turn.thinking, "signature": IMAGE[:80]}
        self.assistant([thinking, {"type": "tool_use", "id": call, "name": turn.tool, "input": turn.arguments}])
        output = [{"type": "text", "text": f"{turn.output}\n<system-reminder>{BOILERPLATE}</system-reminder>"}]
        self.user(
            [{"tool_use_id": call, "type": "tool_result", "content": output, "is_error": False}],
            toolUseResult={"type": "text", "file": {"content": BOILERPLATE}},
        )
        self.assistant([{"type": "text", "text": turn.answer}])

    def boilerplate(self) -> None:
        """What stands around conversations."""
        self.entries.append({"type": "summary", "summary": BOILERPLATE, "leafUuid": self.id("")})
        self.entries.append({"type": "file-history-snapshot", "messageId": self.id(""), "snapshot": {"trackedFileBackups": {}}})
        self.user(f"Caveat: The messages below were generated by the user while running local commands. {BOILERPLATE}", isMeta=True)
        self.user(f"<local-command-caveat>{BOILERPLATE}</local-command-caveat>", isMeta=True)
        self.user(f"<command-name>/model</command-name>\n<command-message>{BOILERPLATE}</command-message>\n<command-args></command-args>")
        self.user(f"<local-command-stdout>{BOILERPLATE}</local-command-stdout>")
        self.user([{"type": "text", "text": f"<ide_opened_file>{BOILERPLATE}</ide_opened_file>"}])
        self.user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}])
        self.add("system", None, subtype="compact_boundary", content=BOILERPLATE, level="info", logicalParentUuid=self.parent)
        self.user(f"This session is being continued from a previous conversation that ran out of context. {BOILERPLATE}", isCompactSummary=True)
        self.add("attachment", None, attachment={"type": "hook_success", "content": BOILERPLATE})
        message = {"id": self.id("msg_"), "role": "assistant", "model": "<synthetic>", "content": [{"type": "text", "text": BOILERPLATE}]}
        self.add("assistant", message, isApiErrorMessage=True)


class CodexSession:
    """Lines of one of Codex's rollouts, with the envelope of since autumn 2025 or without."""

    def __init__(self, rng: random.Random, session: str, cwd: str, envelope: bool = True) -> None:
        self.rng, self.cwd, self.envelope = rng, cwd, envelope
        self.lines: list[dict[str, Any]] = []
        meta = {"id": session, "timestamp": "2025-11-01T10:00:00.000Z", "instructions": BOILERPLATE, "git": {"branch": "main"}}
        if envelope:
            base = {"text": BOILERPLATE}
            self.line("session_meta", {**meta, "cwd": cwd, "originator": "codex_cli_rs", "cli_version": "0.144.1", "base_instructions": base})
        else:
            self.lines.append(meta)
        self.item({"type": "message", "role": "developer", "content": [{"type": "input_text", "text": BOILERPLATE}]})
        self.message("user", f"# AGENTS.md instructions for {cwd}\n\n<INSTRUCTIONS>\n{BOILERPLATE}\n</INSTRUCTIONS>")
        self.message("user", f"<environment_context>\n  <cwd>{cwd}</cwd>\n  {BOILERPLATE}\n</environment_context>")
        self.line("turn_context", {"cwd": cwd, "model": "gpt-5-codex", "summary": BOILERPLATE})

    def line(self, kind: str, payload: dict[str, Any]) -> None:
        if self.envelope:
            self.lines.append({"timestamp": "2025-11-01T10:00:00.000Z", "type": kind, "payload": payload})

    def item(self, item: dict[str, Any]) -> None:
        if self.envelope:
            self.line("response_item", item)
        else:
            self.lines.append(item)

    def message(self, role: str, text: str) -> None:
        self.item({"type": "message", "role": role, "content": [{"type": "output_text" if role == "assistant" else "input_text", "text": text}]})

    def turn(self, turn: Turn) -> None:
        call = f"call_{self.rng.getrandbits(64):016x}"
        self.message("user", turn.prompt)
        self.line("event_msg", {"type": "user_message", "message": turn.prompt, "kind": "plain"})
        self.line("event_msg", {"type": "agent_reasoning", "text": turn.thinking})
        summary = [{"type": "summary_text", "text": turn.thinking}]
        self.item({"type": "reasoning", "summary": summary, "content": None, "encrypted_content": IMAGE})
        self.item({"type": "function_call", "name": turn.tool, "arguments": json.dumps(turn.arguments), "call_id": call})
        output = turn.output if self.envelope else json.dumps({"output": turn.output, "metadata": {"exit_code": 0, "duration_seconds": 0.1}})
        self.item({"type": "function_call_output", "call_id": call, "output": output})
        self.line("event_msg", {"type": "token_count", "info": None})
        self.line("event_msg", {"type": "agent_message", "message": turn.answer})
        self.message("assistant", turn.answer)

    def boilerplate(self) -> None:
        self.item({"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"}]})
        self.line("compacted", {"message": BOILERPLATE, "replacement_history": [{"type": "message", "role": "user", "content": []}]})
        self.item({"type": "ghost_snapshot", "ghost_commit": {"id": BOILERPLATE}})
        if not self.envelope:
            self.lines.append({"record_type": "state"})


def write_history(
    home: Path, seed: int = 1, n_projects: int = 3, n_sessions: int = 3, n_turns: int = 4, lines: int = 6, make_turn: Callable[[Text], Turn] | None = None
) -> Written:
    """Both agents' folders in `home`, n_projects each, n_sessions in each project. `lines`: of the code in a turn; `make_turn`
    makes turns of another kind. The first session of each project is resumed (Claude Code) or forked (Codex) once, and one
    of Claude Code's has an agent inside its transcript and another in a file of its own."""
    rng = random.Random(seed)
    written = Written()
    turn_of = make_turn or (lambda text: text.turn(lines))
    for p in range(n_projects):
        for s in range(n_sessions):
            when = START + (p + s * n_projects) * DAY
            _claude(home, rng, written, p, s, n_turns, when, turn_of)
            _codex(home, rng, written, p, s, n_turns, when + DAY / 2, turn_of)
    return written


def _claude(home: Path, rng: random.Random, written: Written, p: int, s: int, n_turns: int, when: float, turn_of: Callable[[Text], Turn]) -> None:
    folder, text = home / ".claude/projects" / f"-srv-dev-project{p}", Text(rng, f"claude{p}s{s}")
    name = f"{p:08x}-0000-4000-8000-{s:012x}"
    session = ClaudeSession(rng, name, f"/srv/dev/project{p}")
    session.boilerplate()
    turns = [turn_of(text) for _ in range(n_turns)]
    for turn in turns:
        session.turn(turn)
        written.texts += turn.texts
    if s == 0:
        inside = ClaudeSession(rng, name, session.cwd, agent=f"inside{p}")
        own = ClaudeSession(rng, name, session.cwd, agent=f"own{p}")
        for agent in (inside, own):
            turn = turn_of(text)
            agent.turn(turn)
            written.texts += turn.texts
        for i, entry in enumerate(inside.entries):  # between the entries of the session, as older versions write it
            session.entries.insert(len(session.entries) - 1 - 2 * (len(inside.entries) - i), entry)
        written.claude_code.append(write_lines(folder / name / "subagents" / f"agent-{own.agent}.jsonl", own.entries, when))
        write_lines(folder / name / "subagents" / "agent-acompact-1234.jsonl", own.entries, when)
    written.claude_code.append(write_lines(folder / f"{name}.jsonl", session.entries, when))
    if s == 0:  # resumed: copies with the same uuid under a new session id, then something new
        resumed = ClaudeSession(rng, f"{p:08x}-1111-4000-8000-{s:012x}", session.cwd)
        resumed.entries = [{**entry, "sessionId": resumed.session} for entry in session.entries if not entry.get("isSidechain")]
        resumed.parent = session.parent
        turn = turn_of(text)
        resumed.turn(turn)
        written.texts += turn.texts
        written.claude_code.append(write_lines(folder / f"{resumed.session}.jsonl", resumed.entries, when + 3600))


def _codex(home: Path, rng: random.Random, written: Written, p: int, s: int, n_turns: int, when: float, turn_of: Callable[[Text], Turn]) -> None:
    text = Text(rng, f"codex{p}s{s}")
    name = f"{p:08x}-2222-4000-8000-{s:012x}"
    folder = home / ".codex/sessions/2025" / f"{10 + p % 3}" / f"{1 + s:02d}"
    session = CodexSession(rng, name, f"/srv/dev/project{p}", envelope=s != 1)
    turns = [turn_of(text) for _ in range(n_turns)]
    for turn in turns:
        session.turn(turn)
        written.texts += turn.texts
    session.boilerplate()
    written.codex.append(write_lines(folder / f"rollout-2025-1{p % 3}-0{1 + s % 9}T10-00-00-{name}.jsonl", session.lines, when))
    if s == 0:  # forked after half of it: other ids, other times, the same items
        forked = CodexSession(random.Random(seed_of(p)), f"{p:08x}-3333-4000-8000-{s:012x}", session.cwd)
        head = forked.lines[:1]
        forked.lines = head + session.lines[: 6 + 9 * (n_turns // 2)]
        turn = turn_of(text)
        forked.turn(turn)
        written.texts += turn.texts
        written.codex.append(write_lines(folder / f"rollout-2025-1{p % 3}-0{1 + s % 9}T11-00-00-{name}f.jsonl", forked.lines, when + 3600))


def seed_of(p: int) -> int:
    """Forks have call ids of their own."""
    return 7_000 + p
