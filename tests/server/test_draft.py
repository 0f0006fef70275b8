"""The demo pair: a target that exposes its layer inputs, and the DSpark draft that reads them."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import DRAFT, ONE_THREAD, TARGET, Server, run_server

PROMPT = "import os\n\n\ndef read_file(path):\n    with open(path"


@pytest.mark.parametrize("residency", [("--no-spark",), ("--spark", "--spark-slots", "8")])
def test_draft_is_used_and_accepted(start: Callable[..., Server], residency: tuple[str, ...]) -> None:
    server = start("-m", TARGET, "--draft", DRAFT, *residency, "-c", "1024", "-np", "1", *ONE_THREAD)
    answer = server.post("/completion", prompt=PROMPT, n_predict=64, temperature=0)
    timings = answer["timings"]
    assert timings["predicted_n"] == 64 and answer["content"]
    assert timings["draft_n"] > 16 and timings["draft_n_accepted"] > timings["draft_n"] // 10  # trained for this target
    assert server.stop() == 0


def test_draft_that_does_not_fit_is_refused_before_serving(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(DRAFT.read_bytes()[:5000])
    for draft, words in ((TARGET, "as its draft"), (cut, "cannot be read"), (tmp_path / "absent.gguf", "does not exist")):
        done = run_server(["-m", TARGET, "--draft", draft, "--port", "1"])
        assert done.returncode == 1, done.stderr
        assert words in done.stderr and "Traceback" not in done.stderr and "listening" not in done.stderr


def test_old_meaning_of_the_flag_is_explained() -> None:
    done = run_server(["-m", TARGET, "--draft", "16"])
    assert done.returncode == 1 and "--spec-draft-n-max 16" in done.stderr
