"""Reading agent history on a model, without a model: limits, pieces, what is skipped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from pyspark_moe.bootstrap import PIECE_TOKENS, ReadingLimits, check_history, find_history, read_conversations, read_history
from pyspark_moe.config import SparkConfig
from pyspark_moe.errors import ConfigError, InternalError, InvalidArgumentError
from pyspark_moe.history import Conversation, Message, SessionFile
from transcripts import write_history


class FakeReader:
    """Takes a token for every four characters and computes `ubatch` of them in a step, `seconds` each."""

    def __init__(self, ubatch: int = 100, seconds: float = 0.0) -> None:
        self.ubatch, self.seconds = ubatch, seconds
        self.texts: list[str] = []
        self.n_read = 0
        self.now = 0.0
        self._left = 0

    def begin_chat(self, messages: str, n_max: int) -> tuple[int, bool]:
        parsed = json.loads(messages)
        if any("refuse" in m["content"] for m in parsed):
            raise InvalidArgumentError("these are no chat messages")
        self.texts += [m["content"] for m in parsed]
        self._left = min(sum(len(m["content"]) for m in parsed) // 4, n_max)
        return self._left, "plain" in parsed[0]["content"]

    def step(self) -> int:
        n = min(self.ubatch, self._left)
        self.n_read += n
        self._left -= n
        self.now += self.seconds
        return self._left


def conversation(name: str, *texts: str) -> Conversation:
    session = SessionFile("codex", Path(name), 0.0, 0, "")
    return Conversation(session, tuple(Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(texts)))


def test_everything_is_read_once_where_limits_allow() -> None:
    reader = FakeReader()
    shares: list[float] = []
    done = read_conversations([conversation("a", "x" * 400, "y" * 400), conversation("b", "z" * 40)], reader, ReadingLimits(), progress=shares.append)
    assert done.n_tokens == reader.n_read == 210
    assert done.n_pieces == 2 and done.n_plain == 0 and done.ended == "all of it"
    assert shares == sorted(shares) and 0 < shares[-1] < 1


def test_the_limit_of_tokens_is_kept_exactly() -> None:
    reader = FakeReader()
    done = read_conversations((conversation(str(i), "x" * 4000) for i in range(1000)), reader, ReadingLimits(tokens=2550))
    assert done.n_tokens == reader.n_read == 2550
    assert done.ended == "the limit of 2550 tokens"


def test_time_is_looked_at_after_every_step() -> None:
    reader = FakeReader(seconds=0.5)
    done = read_conversations((conversation(str(i), "x" * 4000) for i in range(1000)), reader, ReadingLimits(seconds=3), clock=lambda: reader.now)
    assert done.seconds == 3.0 and done.n_tokens == 600
    assert done.ended == "the limit of 3 s"


def test_no_session_takes_more_than_its_part() -> None:
    reader = FakeReader()
    long = conversation("long", *["x" * 16000] * 10)
    done = read_conversations([long, conversation("b", "z" * 400)], reader, ReadingLimits(tokens_per_session=5000))
    assert done.n_tokens == 5000 + 100


def test_long_conversations_are_read_in_pieces_of_messages_that_follow_one_another() -> None:
    reader = FakeReader()
    texts = [f"{i:03d}" * 1000 for i in range(20)]  # 3000 bytes each
    done = read_conversations([conversation("a", *texts)], reader, ReadingLimits(tokens_per_session=10**6))
    assert reader.texts == texts
    assert done.n_pieces == 5  # four messages are 12000 bytes, a fifth would be beyond 3 * PIECE_TOKENS
    assert 3 * PIECE_TOKENS == 12288


def test_what_llama_cpp_refuses_is_passed_over_and_what_the_template_refuses_is_counted() -> None:
    reader = FakeReader()
    done = read_conversations([conversation("a", "refuse" * 100), conversation("b", "plain" * 80)], reader, ReadingLimits())
    assert done.n_pieces == 1 and done.n_plain == 1 and done.n_tokens == 100


def test_it_stops_when_it_is_told_to() -> None:
    reader = FakeReader()
    done = read_conversations([conversation("a", "x" * 4000)], reader, ReadingLimits(), is_skipped=lambda: reader.n_read >= 300)
    assert done.n_tokens == 300 and done.ended == "skipped"


def test_ctrl_c_skips_the_rest_and_python_gets_its_handler_back(tmp_path: Path) -> None:
    write_history(tmp_path)
    said: list[str] = []

    class Interrupted(FakeReader):
        def step(self) -> int:
            signal.raise_signal(signal.SIGINT)
            return super().step()

    before = signal.getsignal(signal.SIGINT)
    config = SparkConfig(history=str(tmp_path / ".claude"))
    history = find_history(config)
    assert history is not None and history.sessions
    done = read_history(history, config, Interrupted(ubatch=1), said.append)
    assert done is not None and done.ended == "skipped" and done.n_tokens == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_the_log_says_what_is_read_and_how_to_turn_it_off_and_no_text(tmp_path: Path) -> None:
    written = write_history(tmp_path)
    said: list[str] = []
    config = SparkConfig(history=str(tmp_path / ".codex"))
    history = find_history(config)
    assert history is not None
    reader = FakeReader()
    done = read_history(history, config, reader, said.append)
    assert done is not None and done.n_tokens == reader.n_read > 0
    text = "\n".join(said)
    assert str(tmp_path / ".codex" / "sessions") in text and "--spark-history none" in text
    assert f"{done.n_tokens} tokens of {history.n_sessions_read} sessions" in text
    assert not [t for t in written.texts if len(t) > 12 and t in text]


def test_a_failing_computation_ends_it_with_a_sentence(tmp_path: Path) -> None:
    write_history(tmp_path, n_projects=1, n_sessions=1)
    said: list[str] = []

    class Failing(FakeReader):
        def step(self) -> int:
            raise InternalError("llama.cpp could not compute a prompt (status -3)")

    config = SparkConfig(history=str(tmp_path / ".claude"))
    history = find_history(config)
    assert history is not None
    assert read_history(history, config, Failing(), said.append) is None
    assert "status -3" in said[-1]


def test_both_agents_are_found_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    monkeypatch.delenv("CODEX_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_history(tmp_path)
    history = find_history(SparkConfig(history="auto"))
    assert history is not None
    assert {session.source for session in history.sessions} == {"claude-code", "codex"}
    assert find_history(SparkConfig(history="none")) is None


def test_nothing_found_is_said_and_no_error(tmp_path: Path) -> None:
    said: list[str] = []
    config = SparkConfig(history=str(tmp_path))
    history = find_history(config)
    assert history is not None
    assert read_history(history, config, FakeReader(), said.append) is None
    assert "no sessions of coding agents" in said[0]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        check_history(SparkConfig(history=str(tmp_path / "missing")))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"history_tokens": 0}, "--spark-history-tokens is 0"),
        ({"history_seconds": 0}, "--spark-history-seconds is 0"),
        ({"history_seconds": float("nan")}, "--spark-history-seconds is nan"),
        ({"history": ""}, "--spark-history is empty"),
        ({"profile": ""}, "--spark-profile is empty"),
    ],
)
def test_limits_that_mean_nothing_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SparkConfig(**values)  # type: ignore[arg-type]
