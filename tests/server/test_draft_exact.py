"""Greedy text with a draft is the text without, for every held-out prompt, also past the sliding window and on several threads."""
from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import DRAFT, ONE_THREAD, TARGET, Server

HELD_OUT = Path(__file__).parent.parent / "data/heldout.jsonl"
PER_DOMAIN = 8


def prompts(n_characters: int) -> list[str]:
    """32 beginnings of documents the demo model was not trained on, the same number from each domain."""
    by_domain: dict[str, list[str]] = defaultdict(list)
    for line in HELD_OUT.read_text().splitlines():
        document = json.loads(line)
        by_domain[document["domain"]].append(document["text"][:n_characters])
    return [text for texts in by_domain.values() for text in texts[:PER_DOMAIN]]


def greedy(server: Server, texts: list[str], n: int) -> tuple[list[list[int]], int]:
    """Tokens after each prompt, and how many of them all had been drafted and accepted."""
    answers = [server.post("/completion", prompt=text, n_predict=n, temperature=0, cache_prompt=False, return_tokens=True) for text in texts]
    return [a["tokens"] for a in answers], sum(a["timings"].get("draft_n_accepted", 0) for a in answers)


@pytest.mark.parametrize("residency", [("--no-spark",), ("--spark", "--spark-slots", "16")], ids=["resident", "slots"])
@pytest.mark.parametrize("n_draft", [3, 7])
def test_text_with_a_draft_is_the_text_without(start: Callable[..., Server], residency: tuple[str, ...], n_draft: int) -> None:
    texts = prompts(600)
    common = ("-m", TARGET, *residency, "-c", "2048", "-np", "1", "-t", "2")
    expected, _ = greedy(start(*common), texts, 64)
    drafted, n_accepted = greedy(start(*common, "--draft", DRAFT, "--verify-width", n_draft), texts, 64)
    assert len(texts) == 32 and [i for i in range(32) if drafted[i] != expected[i]] == []
    assert n_accepted > 300  # or nothing was tested


def test_text_is_equal_when_the_sliding_window_is_full(start: Callable[..., Server]) -> None:
    """The window's cache has 1024 cells; prompts of about 1,000 tokens go round it while the text is written."""
    texts = [text for text in prompts(4000) if len(text) == 4000][::3]
    common = ("-m", TARGET, "--no-spark", "-c", "2048", "-np", "1", *ONE_THREAD)
    expected, _ = greedy(start(*common), texts, 192)
    drafted, n_accepted = greedy(start(*common, "--draft", DRAFT, "--verify-width", "7"), texts, 192)
    assert len(texts) >= 4 and drafted == expected and n_accepted > 100


def test_cost_is_printed_and_can_be_given_up(start: Callable[..., Server]) -> None:
    exact = start("-m", TARGET, "--no-spark", "--draft", DRAFT, "-c", "1024", "-np", "1", *ONE_THREAD)
    assert "rounded as single ones" in exact.log and "a step of 9 takes" in exact.log
    fast = start("-m", TARGET, "--no-spark", "--draft", DRAFT, "--no-exact-verify", "-c", "1024", "-np", "1", *ONE_THREAD)
    assert "--no-exact-verify" in fast.log and fast.complete("import os\n", 16)
