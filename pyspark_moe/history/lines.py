"""Transcripts as files: found without following anything dangerous, read line by line within bounds.

Nothing but a regular file is opened, and no link to a folder is followed, so loops, FIFOs and devices are only names here.
A file is read up to the size that it had when it was opened: one that grows meanwhile ends.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .base import ReadLimits, ReadReport

MAX_DEPTH = 8  # of folders; agents use up to 6
MAX_ENTRIES = 1_000_000  # of folders and files below one folder: more is a mistake, and would never end
_CHUNK = 1 << 20
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)


def walk(root: Path, wanted: Callable[[str], bool], entered: Callable[[str], bool], report: ReadReport) -> Iterator[tuple[Path, os.stat_result]]:
    """Regular files below `root` whose name is `wanted`, in the order of their names; the folders whose name is `entered`.

    A link to a file counts as the file, once; a link to a folder is passed over, except `root` itself.
    """
    seen: set[tuple[int, int]] = set()
    left = MAX_ENTRIES
    stack: list[tuple[str, int]] = [(str(root), 0)]
    while stack:
        folder, depth = stack.pop()
        entries = []
        try:
            with os.scandir(folder) as found:
                for entry in found:
                    left -= 1
                    if left < 0:
                        break
                    entries.append(entry)
        except OSError:
            report.skip("folders that cannot be read")
            if not entries:
                continue
        if left < 0:
            report.skip("folders with too many entries")
            return
        entries.sort(key=lambda entry: entry.name)
        below = []
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    if entered(entry.name) and depth < MAX_DEPTH:
                        below.append((entry.path, depth + 1))
                    continue
                if entry.is_symlink() and entry.is_dir():
                    report.skip("links to folders")
                    continue
                if not wanted(entry.name):
                    continue
                status = entry.stat()
            except OSError:
                report.skip("dangling links or unreadable files")
                continue
            if not stat.S_ISREG(status.st_mode):
                report.skip("things that are not files")
            elif (status.st_dev, status.st_ino) in seen:
                report.skip("second names of a file")
            else:
                seen.add((status.st_dev, status.st_ino))
                yield Path(entry.path), status
        stack += reversed(below)


def open_regular(path: Path) -> int:
    """A file descriptor for reading a regular file. OSError for everything else: a FIFO that came after a look at the folder
    must not be waited for either."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def read_objects(path: Path, limits: ReadLimits, report: ReadReport) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines. Holds one line at a time; a longer one than allowed is passed over unread."""
    try:
        with open(open_regular(path), "rb") as file:
            report.n_files += 1
            left = min(os.fstat(file.fileno()).st_size, limits.max_scan_bytes)
            if left < os.fstat(file.fileno()).st_size:
                report.skip("ends of files that are too long")
            while left > 0:
                line = file.readline(min(left, limits.max_line_bytes + 1))
                if not line:
                    return
                left -= len(line)
                ended = line.endswith(b"\n")
                if not ended and len(line) > limits.max_line_bytes:
                    report.skip("lines that are too long")
                    line = b""
                    while left > 0 and not ended:
                        rest = file.readline(min(left, _CHUNK))
                        left -= len(rest)
                        ended = not rest or rest.endswith(b"\n")
                    continue
                report.n_lines += 1
                value = _parse(line, ended, report)
                del line  # not held while the consumer works
                if value is not None:
                    yield value
    except OSError:
        report.skip("files that cannot be read")


def _parse(line: bytes, ended: bool, report: ReadReport) -> dict[str, Any] | None:
    """The object that a line is; None when it is something else, which is counted. NaN and infinity become null."""
    text = line.decode("utf-8", "replace").strip("\ufeff\0 \t\r\n")
    if not text:
        return None
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        report.skip("lines that are nested too deeply")
        return None
    except ValueError:
        report.skip("lines that are not JSON" if ended else "last lines that are cut off")
        return None
    if not isinstance(value, dict):
        report.skip("lines that are not JSON objects")
        return None
    return value
