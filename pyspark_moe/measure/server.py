"""A server under measurement, ours or any llama-server: started, asked over HTTP, ended. Every wait is under the time-outs."""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import EngineError, RefusedError, StalledError
from .child import Child
from .limits import Limits
from .streaming import events_of, stream_completion

OURS = (sys.executable, "-m", "pyspark_moe.server.cli")
# How dflash_server refuses: its last words before anything is loaded, or a line among llama-server's when it knows the model.
_REFUSALS = (re.compile(r"^dflash_server: error: (.*)\Z", re.M | re.S), re.compile(r"^spark: error: (?!.* failed, please report this)(.*)$", re.M))


@dataclass(frozen=True)
class Answer:
    """One greedy request. Seconds since it was sent; tokens; llama-server's own rates of decoding and of the prompt."""

    tokens: tuple[int, ...]
    text: str
    first_s: float
    total_s: float
    n_tokens: int
    decode_per_s: float
    n_prompt: int
    prompt_per_s: float

    @property
    def content(self) -> tuple[tuple[int, ...], str]:
        """What must be equal for two answers to be the same. Ids of tokens inside an unfinished character are not sent, so the
        text counts too."""
        return self.tokens, self.text


class MeasuredServer:
    """A running server that answers; `with` ends it.

    name     for messages and results
    program  what to start; `args` follow, then host and port
    is_ours  dflash_server: it gets neither profile nor agent history unless args name one, so that no measurement feeds what
             it measures

    Raises RefusedError when dflash_server refused, EngineError when it ended, StalledError, ConfigError.
    """

    def __init__(self, name: str, program: Sequence[str], args: Sequence[object], limits: Limits, *, is_ours: bool = False) -> None:
        self.name, self.is_ours = name, is_ours
        self._limits = limits
        self.port = _free_port()
        words = [str(arg) for arg in args]
        if is_ours:
            words += [word for flag in ("--spark-profile", "--spark-history") if flag not in words for word in (flag, "none")]
        begin = time.monotonic()
        self._child = Child(f"the server '{name}'", [*program, *words, "--host", "127.0.0.1", "--port", str(self.port)])
        try:
            self._wait_ready()
        except BaseException:
            self._child.close(grace_s=2.0)
            raise
        self.start_s = time.monotonic() - begin

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def peak_ram(self) -> int | None:
        """Bytes of RAM that its process had at most, mapped pages of files included; None when it is gone."""
        try:
            found = re.search(r"^VmHWM:\s*(\d+) kB$", Path(f"/proc/{self.pid}/status").read_text(), re.M)
        except OSError:
            return None
        return 1024 * int(found[1]) if found else None

    def _wait_ready(self) -> None:
        last_sign, log_size = self._limits.clock(), 0
        while True:
            if self._child.process.poll() is not None:
                died = self._child.died("starting")
                refused = self._refusal()
                raise RefusedError(refused) if refused else died
            if self._child.log_size != log_size:
                last_sign, log_size = self._limits.clock(), self._child.log_size
            if self._limits.step_s(last_sign) <= 0:
                raise self._stalled("starting")
            try:
                if self._request("GET", "/health", None, timeout_s=5.0)[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass  # it does not listen yet
            time.sleep(0.05)

    def _refusal(self) -> str:
        """The sentence with which it refused to start; "" when that is not how it ended."""
        if not self.is_ours or self._child.process.returncode != 1:
            return ""
        tail = self._child.log_tail()
        return next((found[1].strip() for pattern in _REFUSALS if (found := pattern.search(tail))), "")

    def complete(self, prompt: Sequence[int], n: int, *, watch: Callable[[], None] | None = None, every: int = 0) -> Answer:
        """Greedy decoding of exactly n tokens, streamed. After the first event, whose arrival is the time to first token, the
        client looks every 2 ms only: a read for every token would take processor time from the server. watch: called after
        the first event and, unless `every` is 0, after about `every` more, and so on. Raises EngineError, StalledError."""
        request = {"prompt": list(prompt), "n_predict": n, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True, "return_tokens": True}
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=self._step_s()) as connection:
                received, first, total = stream_completion(connection, request, self._receive, watch, every)
        except TimeoutError:
            raise self._stalled("answering") from None
        except OSError:
            raise self._child.died("answering") from None
        events = events_of(received)
        if not events or "timings" not in events[-1]:
            raise EngineError(f"{self._child.name} ended its answer early: {bytes(received[-400:])!r}")
        timings = events[-1]["timings"]
        return Answer(
            tokens=tuple(token for event in events for token in event.get("tokens", ())),
            text="".join(event.get("content", "") for event in events),
            first_s=first,
            total_s=total,
            n_tokens=timings["predicted_n"],
            decode_per_s=timings["predicted_per_second"] or 0.0,
            n_prompt=timings["prompt_n"],
            prompt_per_s=timings["prompt_per_second"] or 0.0,
        )

    def _receive(self, connection: socket.socket, received: bytearray) -> None:
        connection.settimeout(self._step_s())
        data = connection.recv(1 << 20)
        received += data
        if received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
            raise EngineError(f"{self._child.name} refused a request: {bytes(received[:400])!r}")
        if not data:
            raise self._child.died("answering")

    def counters(self) -> dict[str, Any] | None:
        """Our counters over all layers; None for a server without a store."""
        if not self.is_ours:
            return None
        status, value = self.ask("GET", "/spark/stats")
        return value.get("total") if status == 200 else None

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """(HTTP status, JSON) of a request; the JSON is None where there is none. Raises EngineError, StalledError."""
        try:
            return self._request(method, path, body, self._step_s())
        except TimeoutError:
            raise self._stalled(f"answering {path}") from None
        except (OSError, http.client.HTTPException):
            raise self._child.died(f"answering {path}") from None

    def _request(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(data)
        except ValueError:
            return response.status, None

    def _step_s(self) -> float:
        """For one wait; raises StalledError when the time for all of it is over."""
        step = self._limits.step_s(self._limits.clock())
        if step <= 0:
            raise self._stalled("at work")
        return step

    def _stalled(self, doing: str) -> StalledError:
        return self._limits.stalled(f"{self._child.name}, {doing},")

    def close(self) -> None:
        self._child.close()

    def __enter__(self) -> MeasuredServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._child.__exit__(kind, value, trace)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
