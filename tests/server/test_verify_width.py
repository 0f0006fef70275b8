"""How many drafted tokens are verified at once: chosen or fixed, and never to be seen in the text."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from harness import DRAFT, ONE_THREAD, TARGET, Server

PROMPTS = ("import os\n\n\ndef read_file(path):\n    with open(path", "The history of the city begins in the year", "class Node:\n    def __init__(self, value")
COMMON = ("-m", TARGET, "-c", "2048", "-np", "2", *ONE_THREAD)


def greedy(server: Server, n: int = 160) -> list[str]:
    return [server.complete(prompt, n, ignore_eos=True) for prompt in PROMPTS]


@pytest.mark.parametrize("residency", [("--no-spark",), ("--spark", "--spark-slots", "8")], ids=["resident", "slots"])
def test_a_width_is_chosen_for_every_draft_and_the_text_is_the_text_without(start: Callable[..., Server], residency: tuple[str, ...]) -> None:
    expected = greedy(start(*COMMON, *residency))
    server = start(*COMMON, *residency, "--draft", DRAFT)
    assert greedy(server) == expected
    draft = server.get("/spark/stats")["draft"]
    width = draft["verify_width"]
    rows = [n for n, _ in width["ms_by_rows"]]
    ms = [ms for _, ms in width["ms_by_rows"]]
    assert width["auto"] and len(width["drafts"]) == 1 + 8  # the demo draft's block
    assert rows[:8] == list(range(1, 9)) and rows[-1] == 2 * (1 + 8)
    assert ms == sorted(ms) and ms[0] > 0
    assert sum(width["drafts"][1:]) >= draft["drafts"] > 0 and draft["drafted"] <= sum(n * count for n, count in enumerate(width["drafts"]))
    assert server.stop() == 0 and "drafts by verify width" in server.log


@pytest.mark.parametrize(
    "flags, auto, most",
    [
        (("--verify-width", "2"), False, 2),
        (("--verify-width", "63"), False, 8),  # no more than is drafted
        (("--spec-draft-n-max", "4"), True, 4),
        (("--verify-width", "auto", "--no-exact-verify"), True, 8),
        (("--no-exact-verify",), False, 3),  # the text would depend on a clock
        (("--no-exact-verify", "--spec-draft-n-max", "5"), False, 5),
    ],
)
def test_the_flags_bound_it(start: Callable[..., Server], flags: tuple[str, ...], auto: bool, most: int) -> None:
    server = start(*COMMON, "--no-spark", "--draft", DRAFT, *flags)
    assert server.complete(PROMPTS[0], 48, ignore_eos=True)
    draft = server.get("/spark/stats")["draft"]
    assert draft["verify_width"]["auto"] == auto and len(draft["verify_width"]["drafts"]) == 1 + most
    assert len(draft["drafted_at"]) == most


def test_steps_of_one_width_reuse_their_graph(start: Callable[..., Server]) -> None:
    """Steady state: a graph is built for the prompt, the first step after it, and the last steps, which may draft fewer tokens."""
    server = start("-m", TARGET, "--no-spark", "--draft", DRAFT, "--verify-width", "6", "-c", "1024", "-np", "1", *ONE_THREAD)
    server.complete(PROMPTS[0], 32, ignore_eos=True)
    before = server.get("/spark/stats")["draft"]
    server.complete(PROMPTS[1], 120, ignore_eos=True)
    after = server.get("/spark/stats")["draft"]
    computed, reused = (after["graphs"][name] - before["graphs"][name] for name in ("computed", "reused"))
    assert computed >= 120 / 7 and computed - reused <= 8
