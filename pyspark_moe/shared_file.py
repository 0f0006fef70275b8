"""A small file that several processes replace: a lock that degrades, replacement as a whole, setting a bad one aside."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK_WAIT_SECONDS = 5.0
_MAX_ASIDE = 100
_MAX_RESULT_BYTES = 64 << 20
LONGEST_ADDITION = 24  # bytes that names of lock, temporary and set-aside files have more than the file's own


def _lock_file(target: Path) -> int | None:
    """A file descriptor to lock; None where not even that can be had."""
    path = target.with_name(f".{target.name}.lock")
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # the second: another user made it
        with suppress(OSError):
            return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    return None


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Keeps other processes and threads that ask for it from writing this file meanwhile; says whether it could.

    Read-only folders and network file systems may have no locks, and a holder that was stopped must not stop us (5 s): then
    writes are still whole, and only what two of them add in the same moment can be lost.
    """
    handle = _lock_file(Path(os.path.realpath(path)))
    held, give_up_at = False, time.monotonic() + _LOCK_WAIT_SECONDS
    try:
        while handle is not None and not held:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    break
                time.sleep(0.005)
            except OSError:
                break
        yield held
    finally:
        if handle is not None:
            if held:  # closing is not enough when a child process has inherited the handle
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _remove_leftovers(target: Path) -> None:
    for name in os.listdir(target.parent):
        if name.startswith(f".{target.name}.") and name.endswith(".tmp"):
            with suppress(OSError):
                os.unlink(target.with_name(name))


def replace_file(path: Path, data: bytes, is_locked: bool) -> None:
    """Writes `data` in place of the file, or of the file that a link leads to; makes it when there is none. Whoever reads,
    or is killed meanwhile, leaves the old file or the new one. `is_locked`: nobody else writes now, so temporary files are
    of writers that were killed, and are removed. Raises OSError: the old file is untouched then."""
    target = Path(os.path.realpath(path))
    if is_locked:
        _remove_leftovers(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666), "wb") as file:
            with suppress(OSError):  # a file that its group may write stays one
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(target).st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    with suppress(OSError):  # not every file system can; the file is whole in any case
        folder = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_regular_file(path: Path, max_bytes: int) -> bytes | None:
    """The content of a regular file, None when there is no file. Devices, pipes and the like are not opened, and never more
    than `max_bytes` are read. Raises ValueError, with the end of a sentence, for what is not such a file; OSError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is not a regular file")
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(max_bytes + 1) if size <= max_bytes else b""
    except FileNotFoundError:
        return None
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise ValueError("its symbolic links lead in a circle") from None
        raise
    if max(size, len(data)) > max_bytes:
        raise ValueError(f"it has {max(size, len(data))} bytes; {max_bytes} is the most")
    return data


def check_own_result(path: Path, member: str) -> None:
    """That a JSON result may be written to `path`: nothing is there, or an empty file, or a JSON object with `member`, which only our
    results have. A model or a corpus that is named by mistake is not replaced. Raises ValueError, with the end of a sentence; OSError."""
    data = read_regular_file(path, _MAX_RESULT_BYTES)
    if not data:
        return
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or member not in value:
        raise ValueError("it exists and is no earlier result")


def set_aside(path: Path) -> Path:
    """Renames a file (a link, a folder ...) to the first free of `<path>.aside-1` to -100 and gives back the new path.
    Raises OSError: nothing changed then."""
    mode = os.lstat(path).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # /dev/null is the whole machine's
        raise OSError(errno.EPERM, "it is a device")
    is_folder = stat.S_ISDIR(mode)
    for number in range(1, _MAX_ASIDE + 1):
        aside = path.with_name(f"{path.name}.aside-{number}")
        try:  # an empty place is taken first, so that the rename can replace nothing of anybody else
            if is_folder:
                os.mkdir(aside)
            else:
                os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            continue
        try:
            os.replace(path, aside)
        except OSError:
            with suppress(OSError):
                (os.rmdir if is_folder else os.unlink)(aside)
            raise
        return aside
    raise OSError(errno.EEXIST, f"{_MAX_ASIDE} files were set aside before it; remove some")
