"""Eight clients at once, some of which hang up: nobody gets a wrong token, nothing crashes, nothing stays held."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from harness import ONE_THREAD, TARGET, Server

N_CLIENTS = 8
ROUNDS = 3
N_PREDICT = 24
PROMPTS = tuple(f"# part {i}\ndef function_{i}(a, b):\n" + "    a = a + b\n" * (3 * i) for i in range(N_CLIENTS))
ARGS = ("-m", str(TARGET), "-c", "8192", "-b", "256", *ONE_THREAD)


def stream_text(server: Server, prompt: str, stop_after: int | None = None) -> str:
    """The streamed greedy text; with stop_after the client hangs up after that many events."""
    text = ""
    with httpx.Client(base_url=server.url, timeout=120) as http:
        body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "cache_prompt": False, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/completion", json=body) as response:
            assert response.status_code == 200
            n_events = 0
            for line in response.iter_lines():
                if line.startswith("data: "):
                    n_events += 1
                    text += httpx.Response(200, content=line.removeprefix("data: ")).json()["content"]
                    if stop_after is not None and n_events >= stop_after:
                        return text
    return text


def crowd(server: Server) -> list[tuple[int, str]]:
    """ROUNDS requests of each client; every third hangs up early. (client, text) of those that stayed."""

    def client(number: int) -> list[tuple[int, str]]:
        chance = random.Random(number)
        kept = []
        for turn in range(ROUNDS):
            if (number + turn) % 3 == 0:
                stream_text(server, PROMPTS[number], stop_after=chance.randint(1, 12))
            else:
                kept.append((number, stream_text(server, PROMPTS[number])))
        return kept

    with ThreadPoolExecutor(N_CLIENTS) as pool:
        return [pair for done in [pool.submit(client, n) for n in range(N_CLIENTS)] for pair in done.result()]


def assert_idle(server: Server) -> None:
    """All slots get free again, also those of clients that hung up."""
    deadline = time.monotonic() + 30
    while any(slot["is_processing"] for slot in server.get("/slots")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Texts of the all-resident server, one client at a time."""
    with Server([*ARGS, "-np", "1", "--spark", "--spark-slots", "32"], tmp_path_factory.mktemp("reference") / "log") as server:
        return [stream_text(server, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("policy", ["frequency", "chaos"])
def test_one_slot_eight_clients_exact_text(policy: str, expected: list[str], tmp_path: Path) -> None:
    """One slot: requests wait for each other, so every batch is the reference's, and so must be every text."""
    with Server([*ARGS, "-np", "1", "--spark", "--spark-slots", "8", "--spark-policy", policy], tmp_path / "log") as server:
        for number, text in crowd(server):
            assert text == expected[number]
        assert_idle(server)
        total = server.get("/spark/stats")["total"]
        assert total["misses"] > 0 and total["evictions"] > 0
        assert total["uses"] == total["hits"] + total["misses"]


@pytest.mark.parametrize(("policy", "slots"), [("frequency", 8), ("chaos", 8), ("chaos", 0)])
def test_eight_slots_eight_clients(policy: str, slots: int, expected: list[str], tmp_path: Path) -> None:
    """Eight at a time: all answers complete, the server stays whole, and afterwards a single client gets the exact text."""
    with Server([*ARGS, "-np", str(N_CLIENTS), "--spark", "--spark-slots", str(slots), "--spark-policy", policy], tmp_path / "log") as server:
        answers = crowd(server)
        assert len(answers) == N_CLIENTS * ROUNDS * 2 // 3
        assert all(len(text) > 0 for _, text in answers)
        assert_idle(server)
        for number in (0, 3, 7):
            assert stream_text(server, PROMPTS[number]) == expected[number]
        total = server.get("/spark/stats")["total"]
        assert total["uses"] == total["hits"] + total["misses"] and total["misses"] > 0
