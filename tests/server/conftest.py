"""Fixtures of the tests over HTTP."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import ONE_THREAD, TARGET, Server  # noqa: E402

API_KEY = "secret-of-the-tests"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """start(*args, **options) -> Server on a free port, stopped at the end of the test."""
    servers: list[Server] = []

    def launch(*args: object, **options: object) -> Server:
        servers.append(Server([str(a) for a in args], tmp_path / f"server-{len(servers)}.log", **options))  # type: ignore[arg-type]
        return servers[-1]

    yield launch
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with a third of the demo model's experts fast, an API key, and everything the API tests ask for."""
    folder = tmp_path_factory.mktemp("api")
    slots = folder / "slots"
    slots.mkdir()
    args = ["-m", TARGET, "--spark", "--spark-slots", "10", "-c", "4096", "-np", "2", *ONE_THREAD, "--jinja", "--metrics", "--swa-full", "--slot-save-path", slots]
    with Server([str(a) for a in args], folder / "server.log", api_key=API_KEY) as server:
        yield server


@pytest.fixture(scope="module")
def tools_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that calls tools. The demo model never learned to, so a template marks calls with a token it does not use
    (5, <|mask|>) and a bias makes that token come first, and the end (4) as soon as llama-server's grammar lets it."""
    template = Path(__file__).with_name("tools.jinja")
    args = ["-m", TARGET, "--spark", "--spark-slots", "10", "-c", "4096", "-np", "1", *ONE_THREAD, "--jinja", "--chat-template-file", template,
            "--logit-bias", "5+100", "--logit-bias", "4+200"]
    with Server([str(a) for a in args], tmp_path_factory.mktemp("tools") / "server.log", api_key=API_KEY) as server:
        yield server


@pytest.fixture(scope="session")
def api_key() -> str:
    """The key of the `api` server."""
    return API_KEY
