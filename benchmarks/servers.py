"""Servers under measurement: start, measure over HTTP, stop."""
from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from common import ROOT
from pyspark_moe.measure.streaming import events_of, stream_completion

DFLASH = (sys.executable, "-m", "pyspark_moe.server.cli")
STOCK = ROOT / "build" / "stock" / "bin" / "llama-server"
DEMO = ROOT / "pyspark_moe" / "data" / "target-Q4_K_M.gguf"


class Failed(Exception):
    """A server did not start or answer; the text has the end of its log."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass(frozen=True)
class Answer:
    """One request. Seconds since it was sent; tokens; llama-server's own rates of decoding and of the prompt; the text."""

    first_s: float
    total_s: float
    n_tokens: int
    decode_per_s: float
    n_prompt: int = 0
    prompt_per_s: float = 0.0
    text: str = ""


class Server:
    """A running server; `enter` runs in the child before the program (a control group, for example)."""

    def __init__(self, program: Sequence[str], args: Sequence[Any], *, enter: Callable[[], None] | None = None, timeout_s: float = 600) -> None:
        self.port = free_port()
        self._log = tempfile.TemporaryFile()
        if tuple(program[-2:]) == DFLASH[-2:]:  # measurements neither feed a profile nor depend on one, unless they say so
            args = [*args, *(part for flag in ("--spark-profile", "--spark-history") if flag not in args for part in (flag, "none"))]
        command = [*map(str, program), *map(str, args), "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, preexec_fn=enter, cwd="/")
        try:
            self._wait(timeout_s)
        except BaseException:
            self.close()
            raise

    def log_tail(self, n: int = 3000) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), n, max(0, size - n)).decode(errors="replace")

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise Failed(f"the server ended with {self.process.returncode}:\n{self.log_tail()}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise Failed(f"the server was not ready after {timeout_s:g} s:\n{self.log_tail()}")

    def complete(
        self, prompt: str | Sequence[int], n: int, *, timeout_s: float = 3600, watch: Callable[[], None] | None = None, every: int = 0
    ) -> Answer:
        """Greedy decoding of exactly n tokens after a text or token ids, streamed. After the first event, whose arrival is the
        time to first token, the client looks every 2 ms only: a read for every token would take processor time from the
        server. watch: called after the first event and, unless `every` is 0, after about `every` more, and so on."""
        what = prompt if isinstance(prompt, str) else list(prompt)
        request = {"prompt": what, "n_predict": n, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True}
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as connection:
            received, first, total = stream_completion(connection, request, self._receive, watch, every)
        if not received.startswith(b"HTTP/1.1 200 "):
            raise Failed(f"the server answered {bytes(received[:400])!r}\n{self.log_tail()}")
        events = events_of(received)
        if not events or "timings" not in events[-1]:
            raise Failed(f"the server's answer ended early: {bytes(received[-400:])!r}\n{self.log_tail()}")
        timings = events[-1]["timings"]
        text = "".join(event.get("content", "") for event in events)
        rates = [timings[key] or 0.0 for key in ("predicted_per_second", "prompt_per_second")]
        return Answer(first, total, timings["predicted_n"], rates[0], timings["prompt_n"], rates[1], text)

    def _receive(self, connection: socket.socket, received: bytearray) -> None:
        data = connection.recv(1 << 20)
        received += data
        if not data or received.startswith(b"HTTP/1.1 4") or received.startswith(b"HTTP/1.1 5"):
            raise Failed(f"the server answered {bytes(received[:400])!r}\n{self.log_tail()}")

    def cpu_s(self) -> float:
        """Processor time the server has used, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def load(self, prompts: Sequence[str], n: int, clients: int) -> dict[str, float]:
        """All prompts, `clients` at a time. tokens_per_s: generated tokens of all clients per second of wall time;
        ttft_ms: median time to first token; cpu_ms_per_token: processor time for each generated token, prompts included."""
        todo, answers, failures = list(reversed(prompts)), [], []
        lock = threading.Lock()

        def client() -> None:
            while True:
                with lock:
                    if not todo or failures:
                        return
                    prompt = todo.pop()
                try:
                    answer = self.complete(prompt, n)
                except (OSError, Failed, ValueError) as e:
                    failures.append(e)
                    return
                with lock:
                    answers.append(answer)

        threads = [threading.Thread(target=client) for _ in range(clients)]
        cpu_before = self.cpu_s()
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.perf_counter() - begin
        if failures:
            raise Failed(f"a request failed: {failures[0]}\n{self.log_tail()}") from failures[0]
        n_tokens = sum(a.n_tokens for a in answers)
        return {
            "tokens_per_s": n_tokens / wall,
            "ttft_ms": 1000 * statistics.median(a.first_s for a in answers),
            "cpu_ms_per_token": 1000 * (self.cpu_s() - cpu_before) / n_tokens,
        }

    def get(self, path: str) -> Any:
        """JSON of a GET; None when the server does not know the path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        return json.loads(body) if response.status == 200 else None

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/tokenize", json.dumps({"content": text}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise Failed(f"the server answered {body[:400]!r} to /tokenize")
        return json.loads(body)["tokens"]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def prompts_from(path: Path, n: int, characters: int) -> list[str]:
    """The first `characters` of n held-out documents, round robin over what the file has."""
    documents = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [str(d.get("text", d.get("content", ""))) for d in documents]
    texts = [t[:characters] for t in texts if len(t) >= characters]
    if not texts:
        raise ValueError(f"'{path}' has no document of {characters} characters or more: give a smaller --prompt-characters.")
    return [texts[i % len(texts)] for i in range(n)]
