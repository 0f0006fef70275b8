"""bench_placement.py: its arithmetic and its text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyspark_moe.history import CLAUDE_CODE, CODEX, History, HistoryFolder
from pyspark_moe.history.corpus import read_corpus
from synthetic import DEMO, PRESETS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_placement as bench  # noqa: E402
import placement_corpora  # noqa: E402
from synthetic_moe.writer import write_model  # noqa: E402

CURVE = [{"tokens": 20.0, "n": 20.0, "hit_rate": 0.5}, {"tokens": 40.0, "n": 20.0, "hit_rate": 0.8}, {"tokens": 49.5, "n": 9.5, "hit_rate": 1.0}]


def test_the_first_tokens_of_a_curve() -> None:
    assert bench.rate_of_first(CURVE, 20) == 0.5
    assert bench.rate_of_first(CURVE, 30) == pytest.approx((20 * 0.5 + 10 * 0.8) / 30)  # half of an interval
    assert bench.rate_of_first(CURVE, 50) == pytest.approx((10 + 16 + 9.5) / 49.5)  # half a token is missing
    assert bench.rate_of_first(CURVE, 51) is None and bench.rate_of_first([], 10) is None


def test_a_mean_curve_is_of_equal_steps_and_as_long_as_the_shortest() -> None:
    other = [{"tokens": 35.0, "n": 35.0, "hit_rate": 0.7}]
    points = bench.mean_curve([CURVE, other])
    assert [point["tokens"] for point in points] == [10, 20, 30]
    assert [point["hit_rate"] for point in points] == pytest.approx([0.6, 0.6, 0.75])


def test_gaps_are_shares_of_the_way_from_the_floor_to_settled() -> None:
    found = bench.gaps({"25": 0.65, "200": 0.55}, {"25": 0.75, "200": 0.75}, {"25": 0.6, "200": 0.6}, 0.8)
    assert found["25"]["closed_bare"] == pytest.approx(0.25) and found["25"]["closed_learned"] == pytest.approx(0.75)
    assert found["25"]["learned / bare"] == pytest.approx(3)
    assert found["200"]["learned / bare"] is None  # nothing is a multiple of less than nothing
    assert bench.closed(0.7, 0.8, 0.8) is None
    # by order where counts of tokens differ a little
    assert bench.gaps({"88": 0.7}, {"87": 0.8}, {"88": 0.6}, {"89": 0.8})["88"]["closed_learned"] == pytest.approx(1)


def test_rates_with_prompts_are_since_the_start() -> None:
    totals = [{"uses": 100, "hits": 50}, {"uses": 180, "hits": 110}, {"uses": 260, "hits": 182, "misses": 78}]
    found = bench.cumulated(totals, uses_per_token=8)
    assert found == [(10, pytest.approx(60 / 80)), (20, pytest.approx(132 / 160))]
    assert bench.mean_by_tokens([found, [(12, 0.25), (20, 0.5)]]) == {"11": pytest.approx(0.5), "20": pytest.approx(0.6625)}


def test_transcripts_tell_the_training_corpus_and_nothing_held_out(tmp_path: Path) -> None:
    text = placement_corpora.make_text(DEMO, tmp_path, n_topics=4)
    train, heldout = ([message.text for c in read_corpus(path) for message in c.messages if message.text] for path in (text.train, text.heldout))
    assert not set(train) & set(heldout)
    history = History.find((HistoryFolder(CLAUDE_CODE, text.history / "projects"), HistoryFolder(CODEX, text.history / "sessions")))
    told = "\n".join(message.text for conversation in history.conversations() for message in conversation.messages)
    assert {session.source for session in history.sessions} == {CLAUDE_CODE, CODEX}
    questions = [c.messages[0].text for c in read_corpus(text.train)]
    assert sum(question.strip() in told for question in questions) > 0.9 * len(questions)
    assert not any(message.strip() in told for message in heldout if len(message) > 100)


def test_a_synthetic_model_gets_words_of_its_topics(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", PRESETS["qwen3moe"], DEMO).path
    words = placement_corpora.topic_words(model, 3)
    assert len(words) == 3 and all(len(of) > 100 for of in words) and not set(words[0]) & set(words[1])
    text = placement_corpora.make_text(model, tmp_path, n_topics=2)
    used = [set(" ".join(message.text for message in c.messages).split()) for c in read_corpus(text.train)]
    assert used[0] <= set(words[0]) and used[1] <= set(words[1]) and used[2] <= set(words[0])
    assert placement_corpora.topic_words(DEMO, 3) == []
