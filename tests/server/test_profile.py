"""What a server learns: from agent history before the first request, from its traffic, over restarts; the same text always."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import ONE_THREAD, TARGET, Server
from pyspark_moe.routing_profile import read_profile

Start = Callable[..., Server]
DATA = Path(__file__).resolve().parent.parent / "data"
PROMPTS = [json.loads(line)["text"][:200] for line in (DATA / "heldout.jsonl").read_text().splitlines()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo model in a folder of its own, so that its profile lies beside it."""
    return Path(shutil.copy(TARGET, tmp_path / "model.gguf"))


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """A Claude Code folder with sessions about what the demo model was trained on; other texts than PROMPTS."""
    folder = tmp_path / "agents" / "projects" / "-work"
    folder.mkdir(parents=True)
    texts = [json.loads(line)["text"] for line in (DATA / "heldout.jsonl").read_text().splitlines()]
    for session in range(4):
        lines = []
        for turn, text in enumerate(texts[session::4]):
            common = {"sessionId": f"s{session}", "cwd": "/work", "timestamp": "2026-01-01T00:00:00Z"}
            lines.append({**common, "type": "user", "uuid": f"u{session}-{turn}", "message": {"role": "user", "content": text[400:1200]}})
            answer = [{"type": "text", "text": text[1200:2000]}]
            lines.append({**common, "type": "assistant", "uuid": f"a{session}-{turn}", "message": {"id": f"m{turn}", "role": "assistant", "content": answer}})
        (folder / f"s{session}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "agents"


def flags(model: Path, *more: object) -> tuple[object, ...]:
    return ("-m", model, "--spark", "--spark-slots", 12, "-c", 2048, "-np", 1, *ONE_THREAD, "--spark-profile", "auto", *more)


def wait_for_tokens(path: Path, n: int) -> Any:
    """The profile once it holds at least n tokens; it is saved behind the answers."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        profile = read_profile(path)
        if profile is not None and profile.tokens >= n:
            return profile
        time.sleep(0.05)
    raise AssertionError(f"'{path}' does not hold {n} tokens")


def test_history_is_read_before_the_first_request_and_raises_its_hit_rate(start: Start, model: Path, agents: Path) -> None:
    cold = start(*flags(model, "--spark-profile", "none", "--spark-policy", "static"))
    texts = [cold.complete(prompt, n=24) for prompt in PROMPTS[:3]]
    cold_rate = cold.get("/spark/stats")["total"]["hit_rate"]
    assert cold.stop() == 0

    learned = start(*flags(model, "--spark-history", agents, "--spark-history-tokens", 6000, "--spark-history-seconds", 300, "--spark-policy", "static"))
    assert "no text is kept" in learned.log and "--spark-history none turns it off" in learned.log
    stats = learned.get("/spark/stats")
    assert stats["total"]["uses"] == 0  # what was read is not counted as served
    assert 0 < stats["profile"]["sources"]["history"] <= 6000
    assert [learned.complete(prompt, n=24) for prompt in PROMPTS[:3]] == texts
    rate = learned.get("/spark/stats")["total"]["hit_rate"]
    assert learned.stop() == 0
    # experts never move here, so the rates say how well those were chosen that serving began with
    assert rate > cold_rate + 0.02, (rate, cold_rate)


def test_a_profile_grows_over_restarts_and_history_is_read_once(start: Start, model: Path, agents: Path) -> None:
    path = model.with_name("model.gguf.spark.csv")
    history = ("--spark-history", agents, "--spark-history-tokens", 2400, "--spark-history-seconds", 300)
    tokens, texts = [], set()
    for run in range(3):
        server = start(*flags(model, *history))
        assert ("tokens of 4 sessions" in server.log) == (run == 0)
        assert ("the hottest experts start in the fast slots" in server.log) == (run > 0)
        resident = [layer["n_resident"] for layer in server.get("/spark/stats")["layers"]]
        assert resident == [12] * 7
        texts.add(server.complete(PROMPTS[0], n=32))
        before = tokens[-1] if tokens else 2400
        tokens.append(wait_for_tokens(path, before + 32).tokens)  # while it serves
        assert server.stop() == 0
        tokens[-1] = read_profile(path).tokens
    assert len(texts) == 1
    assert tokens == sorted(set(tokens))
    profile = read_profile(path)
    assert profile.starts == 3 and profile.sources["history"] == 2400 and profile.sources["traffic"] == tokens[-1] - 2400


def test_a_profile_of_another_model_is_set_aside_and_service_goes_on(start: Start, model: Path) -> None:
    path = model.with_name("model.gguf.spark.csv")
    path.write_bytes((DATA / "profile_good.csv").read_bytes())
    server = start(*flags(model))
    assert "cannot be used" in server.log
    assert server.complete(PROMPTS[0], n=8)
    wait_for_tokens(path, 8)
    assert server.stop() == 0
    assert model.with_name("model.gguf.spark.csv.aside-1").read_bytes() == (DATA / "profile_good.csv").read_bytes()


def test_routing_that_drifts_moves_slots_and_no_text_changes(start: Start, model: Path) -> None:
    plain = start("-m", model, "--spark", "--spark-slots", 32, "-c", 2048, "-np", 1, *ONE_THREAD)
    expected = [plain.complete(prompt, n=8) for prompt in PROMPTS]
    assert plain.stop() == 0
    server = start("-m", model, "--spark", "--spark-ram", "0.0125", "-c", 2048, "-np", 1, *ONE_THREAD, "--spark-profile", "auto")
    before = [layer["n_fast"] for layer in server.get("/spark/stats")["layers"]]
    n_tokens = 0
    for _ in range(20):
        assert [server.complete(prompt, n=8) for prompt in PROMPTS] == expected
        requests = server.get("/spark/stats")["requests"]
        n_tokens = requests["prompt_tokens"] + requests["decoded_tokens"]
        if n_tokens > 9000:
            break
    stats = server.get("/spark/stats")
    after = [layer["n_fast"] for layer in stats["layers"]]
    assert n_tokens > 9000 and "experts were not placed anew" not in server.log
    assert after == [layer["n_fast"] for layer in server.get("/props")["spark"]["layers"]]
    assert ("routing has drifted" in server.log) == (after != before)
    assert server.stop() == 0


def test_a_history_folder_that_is_not_there_ends_the_start(start: Start, model: Path, tmp_path: Path) -> None:
    server = start(*flags(model, "--spark-history", tmp_path / "missing"), wait=False)
    assert server.process.wait(60) == 1
    assert "is no folder" in server.log and "Traceback" not in server.log
