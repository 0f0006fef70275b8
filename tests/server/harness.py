"""Starts and stops one server process for a test, and says what it logged when something goes wrong."""
from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

import pyspark_moe

DATA = Path(pyspark_moe.__file__).parent / "data"
TARGET, DRAFT = DATA / "target-Q4_K_M.gguf", DATA / "draft-q8_0.gguf"
ONE_THREAD = ("-t", "1")  # threads that wait for each other crawl on a busy machine
DFLASH_SERVER = (sys.executable, "-m", "pyspark_moe.server.cli")


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class ServerFailed(Exception):
    """The server ended, or did not get ready in time; the text has the end of its log."""


class Server:
    """A running server. `args`: without host and port. `program`: dflash_server, or another llama-server to compare with.

    The constructor returns when /health says ok; ServerFailed otherwise. `api_key` is sent with every request. `log_path`
    receives stdout and stderr.
    """

    def __init__(self, args: Sequence[str], log_path: Path, *, program: Sequence[str] = DFLASH_SERVER, api_key: str | None = None,
                 timeout_s: float = 120, wait: bool = True, preexec: Any = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        command = [*program, *map(str, args), "--host", "127.0.0.1", "--port", str(self.port)]
        if program is DFLASH_SERVER:  # a test that wants a profile says so
            command += [part for flag in ("--spark-profile", "--spark-history") if flag not in command for part in (flag, "none")]
        if api_key is not None:
            command += ["--api-key", api_key]
        headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s)
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=preexec)
        if wait:
            try:
                self.wait_ready(timeout_s)
            except BaseException:
                self.kill()
                raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """Everything printed so far."""
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the model is loaded and requests are answered."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended with {self.process.returncode} before it was ready:\n{self.log[-4000:]}")
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise ServerFailed(f"the server was not ready after {timeout_s:g} s:\n{self.log[-4000:]}")

    def get(self, path: str) -> Any:
        """JSON of a GET that must succeed."""
        return self._checked(self.http.get(path))

    def post(self, path: str, **body: Any) -> Any:
        """JSON of a POST that must succeed."""
        return self._checked(self.http.post(path, json=body))

    def _checked(self, response: httpx.Response) -> Any:
        assert response.status_code == 200, f"{response.request.url}: {response.status_code} {response.text}\n{self.log[-2000:]}"
        return response.json()

    def complete(self, prompt: str, n: int = 16, **body: Any) -> str:
        """Greedy text after `prompt`, nothing cached."""
        options = {"n_predict": n, "temperature": 0, "cache_prompt": False} | body
        return self.post("/completion", prompt=prompt, **options)["content"]

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """Events of a streamed POST, decoded."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30) -> int:
        """Sends a signal and returns the exit code; ServerFailed when the server does not end."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as e:
            self.kill()
            raise ServerFailed(f"the server did not end within {timeout_s:g} s of signal {number}:\n{self.log[-4000:]}") from e

    def kill(self) -> None:
        """Ends it at once."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            code = self.stop()
            assert code == 0, f"exit code {code} after SIGTERM:\n{self.log[-4000:]}"
        else:
            self.kill()


def run_server(args: Sequence[str], *, program: Sequence[str] = DFLASH_SERVER, timeout_s: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs to the end, for starts that must be refused; stdout and stderr as text."""
    return subprocess.run([*program, *map(str, args)], capture_output=True, text=True, errors="replace", timeout=timeout_s, **options)
