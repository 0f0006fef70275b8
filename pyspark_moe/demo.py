"""`make demo`: starts dflash_server with the demo model and half of its experts' bytes, asks it two things, prints what
it answered and how residency did, and stops it. Exit status 0 when all of that worked."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends the demo without a traceback

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import IO, Any

_READY_TIMEOUT_S = 300
_REQUEST_TIMEOUT_S = 300
_STOP_TIMEOUT_S = 30
_LOG_TAIL_LINES = 40
_CHAT = "How do I read a text file line by line in Python?"
_CODE = "def fibonacci(n):\n    "


class DemoError(Exception):
    """A step of the demo did not work; the message says which."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def request(url: str, body: dict[str, Any] | None = None, timeout_s: float = _REQUEST_TIMEOUT_S) -> dict[str, Any]:
    """GET, or POST with a JSON body; the JSON of the answer. Raises urllib.error.URLError, ValueError."""
    data = None if body is None else json.dumps(body).encode()
    message = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(message, timeout=timeout_s) as reply:
        return json.load(reply)


class DemoServer:
    """A dflash_server in its own process; always stopped on the way out."""

    def __init__(self, flags: list[str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "pyspark_moe.server.cli", *flags, "--host", "127.0.0.1", "--port", str(self.port)]
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DemoServer:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            self.print_tail()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            code = self._process.poll() if self._process else None
            if code is not None:
                raise DemoError(f"The server ended with exit status {code} before it was ready.")
            try:
                request(f"{self.url}/health", timeout_s=2)
                return
            except (urllib.error.URLError, OSError, ValueError):
                time.sleep(0.1)  # refused while it starts, status 503 while it loads
        raise DemoError(f"The server was not ready after {_READY_TIMEOUT_S} s.")

    def stop(self) -> int | None:
        """Ends the server as Ctrl-C would; its exit status."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return process.returncode

    def log_lines(self) -> list[str]:
        """What the server has printed so far."""
        with os.fdopen(os.dup(self._log.fileno()), "rb") as log:
            log.seek(0)
            return log.read().decode(errors="replace").splitlines()

    def print_tail(self) -> None:
        """The end of its log on stderr, for a person who has to find out what went wrong."""
        print("\nThe end of the server's log:", file=sys.stderr)
        for line in self.log_lines()[-_LOG_TAIL_LINES:]:
            print(f"    {line}", file=sys.stderr)


def _show(title: str, text: str) -> None:
    print(f"\n{title}")
    for line in text.strip("\n").splitlines() or [""]:
        print(f"    {line}")


def _show_residency(stats: dict[str, Any]) -> None:
    total = stats.get("total")
    if not stats.get("active") or not total:
        raise DemoError(f"The server runs without residency: {stats.get('why')}")
    if not total["uses"]:
        raise DemoError("No use of an expert was counted: the model did not read its experts through the store.")
    print("\nExpert residency")
    print(f"    fast slots   {total['n_fast']} for {total['n_expert']} experts, {total['fast_bytes'] / 2**20:.1f} MiB, {total['n_resident']} filled")
    print(f"    hit rate     {100 * total['hit_rate']:.1f} % of {total['uses']} expert uses")
    print(f"    misses       {total['misses']}, of these {total['misses_home']} read in place")
    print(f"    promotions   {total['promotions']}, evictions {total['evictions']}, {(total['bytes_read'] + total['bytes_home']) / 2**20:.1f} MiB read")


def run(extra_flags: list[str]) -> None:
    """The demo. Raises DemoError, OSError, urllib.error.URLError."""
    started = time.monotonic()
    with DemoServer(["--demo", "--spark", *extra_flags]) as server:
        try:
            print(f"dflash_server is ready at {server.url} after {time.monotonic() - started:.1f} s")
            for line in server.log_lines():
                if line.startswith("spark:"):
                    print(f"    {line}")
            chat = request(
                f"{server.url}/v1/chat/completions",
                {"messages": [{"role": "user", "content": _CHAT}], "max_tokens": 96, "temperature": 0},
            )
            _show(f"Chat: {_CHAT}", chat["choices"][0]["message"]["content"])
            _show_speed(chat)
            code = request(f"{server.url}/v1/completions", {"prompt": _CODE, "max_tokens": 96, "temperature": 0})
            _show("Code completion", _CODE + code["choices"][0]["text"])
            _show_speed(code)
            _show_residency(request(f"{server.url}/spark/stats"))
        except BaseException:
            server.print_tail()
            raise
        status = server.stop()
        if status != 0:
            server.print_tail()
            raise DemoError(f"The server ended with exit status {status} instead of 0.")
    print("\nThe model is a toy that shows the machinery: judge the speed and the figures, not the answers.")


def _show_speed(answer: dict[str, Any]) -> None:
    timings = answer.get("timings")
    if not timings:
        raise DemoError("The answer has no timings.")
    print(f"    ({timings['predicted_n']} tokens, {timings['predicted_per_second']:.0f} tokens/s)")


def main() -> int:
    """Entry point of `python -m pyspark_moe.demo [DFLASH_SERVER FLAGS]`; the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run(sys.argv[1:])
    except (DemoError, OSError, ValueError, KeyError) as e:
        print(f"demo: {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
