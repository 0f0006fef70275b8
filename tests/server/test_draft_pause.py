"""Drafts that help nobody: useless ones are paused, broken ones are turned off, and the text stays what it is."""
from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from harness import DRAFT, ONE_THREAD, TARGET, Server

PROMPT = "import os\n\n\ndef read_file(path):\n    with open(path"
WINDOW, REST = 24, 256  # native/speculative/draft_pause.h


def spoiled_draft(path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """The demo draft with other bytes in one tensor."""
    shutil.copyfile(DRAFT, path)
    tensor = next(t for t in GGUFReader(DRAFT).tensors if t.name == name)
    with path.open("r+b") as file:
        file.seek(tensor.data_offset)
        file.write(change(np.array(tensor.data)).tobytes())
    return path


def turned_round(weights: np.ndarray) -> np.ndarray:
    """F32 weights that make the least likely token the most likely one."""
    return weights * np.float32(-50)


def without_scales(blocks: np.ndarray) -> np.ndarray:
    """Q8_0 blocks whose scales are not numbers. (On the CPU a NaN that is quantised on its way becomes 0, so not every one is seen.)"""
    scales = blocks.reshape(-1, 34)
    scales[:, :2] = np.frombuffer(np.float16("nan").tobytes(), np.uint8)
    return blocks


def ask(start: Callable[..., Server], n: int, *args: object) -> tuple[str, dict[str, Any], Server]:
    """Greedy text, what /spark/stats says about drafting, and the server."""
    server = start("-m", TARGET, "--no-spark", "-c", "1024", "-np", "1", *ONE_THREAD, *args)
    text = server.complete(PROMPT, n, ignore_eos=True)
    return text, server.get("/spark/stats").get("draft"), server


def test_useless_drafts_pause_and_begin_anew(start: Callable[..., Server], tmp_path: Path) -> None:
    n = WINDOW + REST + 12
    expected, none, _ = ask(start, n)
    text, draft, server = ask(start, n, "--verify-width", "3", "--draft", spoiled_draft(tmp_path / "useless.gguf", "output_norm.weight", turned_round))
    assert none is None and text == expected
    assert draft["pauses"] == 1 and f"fewer than 10 % of the last {WINDOW} drafts" in server.log
    assert WINDOW < draft["drafts"] < WINDOW + 12  # it drafts again after the rest, and no pause was shorter
    assert draft["paused"] == 0


def test_drafts_that_are_not_numbers_are_turned_off(start: Callable[..., Server], tmp_path: Path) -> None:
    expected, _, _ = ask(start, 48)
    text, draft, server = ask(start, 48, "--draft", spoiled_draft(tmp_path / "broken.gguf", "markov_w2.weight", without_scales))
    assert text == expected and draft["broken"] and draft["drafts"] <= 1
    assert server.log.count("logits that are not numbers") == 1
    assert server.complete(PROMPT, 48, ignore_eos=True) == expected and server.get("/spark/stats")["draft"]["drafts"] == draft["drafts"]


@pytest.mark.parametrize("residency", [("--no-spark",), ("--spark", "--spark-slots", "16")], ids=["resident", "slots"])
def test_a_good_draft_is_profiled(start: Callable[..., Server], residency: tuple[str, ...]) -> None:
    server = start("-m", TARGET, *residency, "--draft", DRAFT, "--verify-width", "5", "-c", "1024", "-np", "1", *ONE_THREAD)
    answer = server.post("/completion", prompt=PROMPT, n_predict=96, temperature=0, ignore_eos=True)
    deadline = time.monotonic() + 30
    while (draft := server.get("/spark/stats")["draft"])["steps"] < draft["drafts"] and time.monotonic() < deadline:
        time.sleep(0.02)  # the last step ends after its answer
    assert (draft["drafted"], draft["accepted"]) == (answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"])
    assert draft["steps"] == draft["drafts"] > 0 and draft["pauses"] == 0 and not draft["broken"]
    assert sum(draft["accepted_at"]) == draft["accepted"] and sum(draft["drafted_at"]) == draft["drafted"]
    assert sorted(draft["accepted_at"], reverse=True) == draft["accepted_at"] and len(draft["accepted_at"]) == 5
    assert draft["ms"]["heads"] is None and all(draft["ms"][name] > 0 for name in ("draft", "verify", "features", "sampling", "other"))
    assert sum(ms or 0 for ms in draft["ms"].values()) <= answer["timings"]["predicted_ms"] * 1.5
    assert server.stop() == 0 and "% accepted by depth:" in server.log
