"""Patches as values: parse, apply exactly, reverse, compare, write.

A hunk applies where every old line matches, and nowhere else. Its position may differ from the one in its header only
within `max_offset` lines (default 0), and the difference is reported to the caller. There is no fuzz: a hunk whose
context has changed is for a person to look at. Nothing here reads or writes files.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)")
SECTION = re.compile(r"[A-Za-z_$]")
NO_NEWLINE = "\\ No newline at end of file"


class PatchError(Exception):
    """A patch cannot be read, or does not apply; the text names the patch, the file and the hunk."""


@dataclass(frozen=True)
class Hunk:
    """A contiguous change: `old` lines at line `start` (1-based, of the old file) become `new` lines."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    changed: int  # lines added plus lines removed
    title: str  # the @@ line, for messages


@dataclass(frozen=True)
class FilePatch:
    """All hunks of one file, in order. `created` and `deleted`: the file did not exist before, or does not after."""

    path: str
    hunks: tuple[Hunk, ...]
    created: bool = False
    deleted: bool = False


@dataclass(frozen=True)
class Patch:
    """One file of the series. `header` is everything before the first diff, kept verbatim by refresh."""

    name: str
    header: str
    files: tuple[FilePatch, ...]

    @property
    def changed_lines(self) -> int:
        return sum(hunk.changed for file in self.files for hunk in file.hunks)


def split_lines(text: str) -> list[str]:
    """Lines with their newline; only \\n ends a line (str.splitlines also splits at form feeds)."""
    lines = text.split("\n")
    ended = [line + "\n" for line in lines[:-1]]
    return ended + [lines[-1]] if lines[-1] else ended


def parse_patch(name: str, text: str) -> Patch:
    """Reads one patch file. Raises PatchError with the line number of what is malformed."""
    lines = split_lines(text)
    first = next((i for i, line in enumerate(lines) if line.startswith(("diff --git ", "--- a/", "--- /dev/null"))), len(lines))
    files: list[FilePatch] = []
    at = first
    while at < len(lines):
        if not lines[at].startswith("--- "):
            if lines[at].startswith("@@ "):
                raise PatchError(f"{name}: line {at + 1} is a hunk that belongs to no file")
            at += 1
            continue
        if at + 1 >= len(lines) or not lines[at + 1].startswith("+++ "):
            raise PatchError(f"{name}: line {at + 1} starts a file but no '+++' line follows")
        old, new = lines[at][4:].split("\t")[0].strip(), lines[at + 1][4:].split("\t")[0].strip()
        created, deleted = old == "/dev/null", new == "/dev/null"
        path = _strip_prefix(name, at, old if deleted else new)
        at += 2
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith("@@ "):
            hunk, at = _parse_hunk(name, lines, at)
            hunks.append(hunk)
        if not hunks:
            raise PatchError(f"{name}: {path} is named but has no hunk")
        files.append(FilePatch(path, tuple(hunks), created, deleted))
    return Patch(name, "".join(lines[:first]), tuple(files))


def _strip_prefix(name: str, at: int, path: str) -> str:
    parts = path.split("/")
    if len(parts) < 2 or parts[0] not in ("a", "b") or ".." in parts or "" in parts:
        raise PatchError(f"{name}: line {at + 1} names {path!r}; a path must read a/... or b/... and stay inside the tree")
    return "/".join(parts[1:])


def _parse_hunk(name: str, lines: list[str], at: int) -> tuple[Hunk, int]:
    match = HUNK.match(lines[at])
    if not match:
        raise PatchError(f"{name}: line {at + 1} is not a hunk header: {lines[at].rstrip()!r}")
    start = int(match[1])
    n_old, n_new = int(match[2] or 1), int(match[4] or 1)
    title = lines[at].strip()
    old: list[str] = []
    new: list[str] = []
    changed = 0
    kind = ""
    at += 1
    while at < len(lines) and (len(old) < n_old or len(new) < n_new or lines[at].startswith("\\")):
        line = lines[at]
        if line.startswith("\\"):
            if kind in (" ", "-"):
                old[-1] = old[-1].rstrip("\n")
            if kind in (" ", "+"):
                new[-1] = new[-1].rstrip("\n")
            at += 1
            continue
        kind = line[0] if line != "\n" else " "  # editors strip the blank of an empty context line
        body = line[1:] if line != "\n" else "\n"
        if kind not in " +-":
            break
        if kind in " -":
            old.append(body)
        if kind in " +":
            new.append(body)
        changed += kind != " "
        at += 1
    if (len(old), len(new)) != (n_old, n_new):
        raise PatchError(f"{name}: hunk {title!r} has {len(old)} old and {len(new)} new lines, its header says {n_old} and {n_new}")
    return Hunk(start, tuple(old), tuple(new), changed, title), at


def apply_file(patch_name: str, file: FilePatch, content: str | None, max_offset: int = 0) -> tuple[str | None, list[int]]:
    """Applies one file's hunks. `content` is None when the file does not exist.

    Returns the new content (None when the patch deletes the file) and, for each hunk, how many lines away from its
    header's position it was found. Raises PatchError naming the first hunk that does not match.
    """
    where = f"{patch_name}: {file.path}"
    if file.created and content is not None:
        raise PatchError(f"{where}: the patch creates this file, but it exists already")
    if not file.created and content is None:
        raise PatchError(f"{where}: no such file in the source tree; upstream has moved or removed it")
    lines = split_lines(content or "")
    out: list[str] = []
    offsets: list[int] = []
    done = 0  # lines of the old file consumed
    drift = 0  # where the last hunk was found: the next one is looked for there first
    for number, hunk in enumerate(file.hunks, 1):
        want = max(hunk.start - 1, 0) if hunk.old else hunk.start
        found = _find(lines, hunk.old, want, drift, done, max_offset)
        if found is None:
            raise PatchError(_mismatch(where, number, len(file.hunks), hunk, lines, want))
        out += lines[done:found]
        out += hunk.new
        done = found + len(hunk.old)
        drift = found - want
        offsets.append(drift)
    out += lines[done:]
    if file.deleted:
        if out:
            raise PatchError(f"{where}: the patch deletes this file, but {len(out)} lines of it are unknown to the patch")
        return None, offsets
    return "".join(out), offsets


def _find(lines: list[str], old: tuple[str, ...], want: int, drift: int, done: int, max_offset: int) -> int | None:
    candidates = [want, want + drift] + [want + drift + sign * n for n in range(1, max_offset + 1) for sign in (1, -1)]
    for at in candidates:
        if abs(at - want) <= max(max_offset, 0) and at >= done and tuple(lines[at : at + len(old)]) == old and at + len(old) <= len(lines):
            return at
    return None


def _mismatch(where: str, number: int, count: int, hunk: Hunk, lines: list[str], want: int) -> str:
    text = f"{where}: hunk {number} of {count} does not apply: {hunk.title}"
    for i, line in enumerate(hunk.old):
        have = lines[want + i] if 0 <= want + i < len(lines) else "<end of file>"
        if have != line:
            return f"{text}\n  line {want + i + 1} should read {line.rstrip()!r}\n  and reads             {have.rstrip()!r}"
    return f"{text}\n  its lines are taken by the hunk before it"


def reverse_file(file: FilePatch) -> FilePatch:
    """The patch that undoes `file`."""
    shift = 0
    hunks = []
    for hunk in file.hunks:
        # a hunk without old lines starts after the line it names, one without new lines too
        start = hunk.start + shift + (0 if hunk.old else 1) - (0 if hunk.new else 1)
        hunks.append(replace(hunk, start=start, old=hunk.new, new=hunk.old))
        shift += len(hunk.new) - len(hunk.old)
    return FilePatch(file.path, tuple(hunks), created=file.deleted, deleted=file.created)


def diff_file(path: str, old: str | None, new: str | None) -> str:
    """A unified diff in git's form with the enclosing function in each hunk header; "" when nothing differs."""
    if old == new:
        return ""
    old_lines, new_lines = split_lines(old or ""), split_lines(new or "")
    out = [f"diff --git a/{path} b/{path}\n"]
    if old is None:
        out.append("new file mode 100644\n")
    if new is None:
        out.append("deleted file mode 100644\n")
    names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
    for number, line in enumerate(difflib.unified_diff(old_lines, new_lines, *names, lineterm="\n")):
        if number < 2:
            out.append(line.rstrip("\n") + "\n")
            continue
        match = HUNK.match(line) if line.startswith("@@ ") else None
        if match:
            out.append(line.rstrip("\n") + _section(old_lines, int(match[1])) + "\n")
        elif line.endswith("\n"):
            out.append(line)
        else:
            out.append(f"{line}\n{NO_NEWLINE}\n")
    return "".join(out)


def _section(lines: list[str], start: int) -> str:
    for line in reversed(lines[: max(start - 1, 0)]):
        if SECTION.match(line):
            return " " + line.strip()[:60]
    return ""
