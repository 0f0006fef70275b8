"""Q, K and V read as one matrix where they lie next to each other: the same numbers as three products."""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from harness import DRAFT, ONE_THREAD, TARGET, Server

PROMPTS = ("import os\n\n\ndef read_file(path):\n    with open(path", "The history of the city begins in the year")
# On the CPU matrices lie next to each other when they are neither mapped nor repacked.
COMMON = ("-m", TARGET, "-c", "1024", "-np", "2", *ONE_THREAD, "--load-mode", "none", "--no-repack", "--verbose")


def fused_layers(server: Server) -> int:
    found = re.search(r"Q, K and V are one matrix in (\d+) of 8 layers", server.log)
    assert found, server.log[-2000:]
    return int(found[1])


def answers(server: Server) -> list[Any]:
    """Greedy tokens with the log probabilities of ten candidates each, as they are sent."""
    texts = [server.post("/completion", prompt=p, n_predict=64, temperature=0, n_probs=10, cache_prompt=False) for p in PROMPTS]
    return [(a["content"], [(p["id"], p["logprob"], p["top_logprobs"]) for p in a["completion_probabilities"]]) for a in texts]


@pytest.mark.parametrize("flags", [("--no-spark",), ("--spark", "--spark-slots", "8"), ("--no-spark", "--draft", DRAFT, "--verify-width", "7")], ids=["resident", "slots", "draft"])
def test_every_number_is_the_same(start: Callable[..., Server], flags: tuple[object, ...]) -> None:
    fused, split = start(*COMMON, *flags), start(*COMMON, *flags, "--no-fused-qkv")
    assert fused_layers(fused) == 4 and fused_layers(split) == 0  # the demo model's other layers have V of another type
    expected = answers(split)
    assert answers(fused) == expected and len(expected[0][1]) == 64


def test_matrices_that_are_apart_are_left_alone(start: Callable[..., Server]) -> None:
    assert fused_layers(start("-m", TARGET, "--no-spark", "-c", "512", *ONE_THREAD, "--verbose")) == 0
