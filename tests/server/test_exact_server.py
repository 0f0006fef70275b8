"""The same through the server: greedy text and every reported probability equal those of the all-resident server.

One slot, nothing cached: each request then is the same sequence of batches in both servers, whatever the other clients
do meanwhile. (With several slots a batch's composition depends on timing, and on the CPU that changes rounding; equality
under a fixed composition is tested in test_exact.py and test_exact_threads.py.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import DRAFT, ONE_THREAD, TARGET, Server
from synthetic import ModelFolder, models  # noqa: F401

PROMPTS = ("def quicksort(items):\n", "The kernel was built", "<|user|>What is a list?<|end|><|assistant|>", "import numpy as np\n" * 40)
ARGS = ("-m", str(TARGET), "-c", "2048", "-np", "1", "-b", "256", "-ub", "128", *ONE_THREAD)


def answers(server: Server) -> list[dict[str, Any]]:
    """Text, and the ten likeliest tokens with their probabilities at each step, of every prompt."""
    kept = []
    for prompt in PROMPTS:
        answer = server.post("/completion", prompt=prompt, n_predict=24, temperature=0, cache_prompt=False, n_probs=10, ignore_eos=True)
        kept.append({"content": answer["content"], "probabilities": answer["completion_probabilities"]})
    return kept


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    with Server([*ARGS, "--spark", "--spark-slots", "32"], tmp_path_factory.mktemp("reference") / "log") as server:
        result = answers(server)
        assert server.get("/spark/stats")["total"]["misses"] == 0
    assert all(len(a["probabilities"]) == 24 for a in result)
    yield result


@pytest.mark.parametrize("policy", ["frequency", "chaos"])
@pytest.mark.parametrize("slots", [0, 3, 10, 20])
def test_residency(slots: int, policy: str, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    with Server([*ARGS, "--spark", "--spark-slots", str(slots), "--spark-policy", policy], tmp_path / "log") as server:
        assert answers(server) == expected
        assert server.get("/spark/stats")["total"]["misses"] > 0


def test_plain_layout_without_a_store(tmp_path: Path) -> None:
    """llama-server alone says the same when neither repacks weights (a store never repacks experts)."""
    with Server([*ARGS, "--no-spark", "--no-repack"], tmp_path / "plain.log") as server:
        plain = answers(server)
    with Server([*ARGS, "--spark", "--spark-slots", "8", "--no-repack"], tmp_path / "stored.log") as server:
        assert answers(server) == plain


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_with_a_draft(kind: str, models: ModelFolder, tmp_path: Path) -> None:
    """A draft head inside the model (another context on the same store), and a draft model of its own, beside experts that
    move: the drafts, what is accepted, and the text are those of the all-resident server."""
    if kind == "mtp":
        args = ["-m", str(models.get("qwen35moe-mtp")), "--spec-type", "draft-mtp"]
    else:
        args = ["-m", str(TARGET), "--draft", str(DRAFT)]
    seen = []
    for slots, policy in ((32, "frequency"), (4, "chaos"), (0, "frequency")):
        options = [*args, "-c", "1024", "-np", "1", *ONE_THREAD, "--spark", "--spark-slots", str(slots), "--spark-policy", policy]
        with Server(options, tmp_path / f"{slots}.log") as server:
            answer = server.post("/completion", prompt=PROMPTS[0], n_predict=32, temperature=0, cache_prompt=False, ignore_eos=True)
            timings = answer["timings"]
            seen.append((answer["content"], timings["draft_n"], timings["draft_n_accepted"]))
            assert timings["draft_n"] > 0, "nothing was drafted, so nothing was tested"
            if kind == "dspark":
                assert timings["draft_n_accepted"] > 0
    assert seen[1] == seen[0] and seen[2] == seen[0]
