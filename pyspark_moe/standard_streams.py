"""stdout and stderr as they come: closed, full, gone, or of a character set without the ones we print. Imports nothing from the package."""

from __future__ import annotations

import errno
import os
import sys
from typing import TextIO


def open_closed_streams() -> None:
    """Opens /dev/null where the process was started with stdin, stdout or stderr closed. The next file that is opened would get
    their number, and whatever writes there next, llama.cpp's log for one, would write into a profile or into a client's answer."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError as e:
            if e.errno != errno.EBADF:
                raise
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, so this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def accept_every_character() -> None:
    """Characters that stdout cannot show are printed as escapes, as Python does for stderr: a file's name ends no command."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """One line on stderr, at once. Lost where stderr is full or nobody reads it any more: a log ends nothing."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: a script closed it
        pass


def flush_error(stream: TextIO) -> OSError | None:
    """Writes what the stream has kept back; why that failed, or None. What could not be written is dropped then, or Python would
    try again at its end and change the exit code."""
    try:
        stream.flush()
    except OSError as e:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return e
    return None
