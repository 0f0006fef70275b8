"""Tokens that came through a draft have the logprobs they would have had without."""
from __future__ import annotations

from collections.abc import Callable

import openai
import pytest

from harness import DRAFT, ONE_THREAD, TARGET, Server

PROMPT = "import os\n\n\ndef read_file(path):\n    with open(path"


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def pair(start: Callable[..., Server]) -> tuple[Server, Server]:
    """The same model without and with its draft."""
    args = ("-m", TARGET, "--no-spark", "-c", "1024", "-np", "1", *ONE_THREAD)
    return start(*args), start(*args, "--draft", DRAFT, "--verify-width", "7")


def test_chat_logprobs_are_those_without_a_draft(pair: tuple[Server, Server]) -> None:
    answers = []
    for server in pair:
        with client(server) as api:
            answer = api.chat.completions.create(model="any", messages=[{"role": "user", "content": PROMPT}], max_tokens=48, temperature=0, logprobs=True, top_logprobs=4)
        answers.append([(t.token, t.logprob, [(o.token, o.logprob) for o in t.top_logprobs]) for t in answer.choices[0].logprobs.content])
    assert pair[1].get("/spark/stats")["draft"]["accepted"] > 5
    assert all(len(top) == 4 for _, _, top in answers[1])
    assert answers[1] == answers[0]  # bit for bit: verified tokens are rounded as single ones


def test_streamed_logprobs_are_complete(pair: tuple[Server, Server]) -> None:
    texts = []
    for server in pair:
        with client(server) as api:
            chunks = list(api.completions.create(model="any", prompt=PROMPT, max_tokens=32, temperature=0, logprobs=2, stream=True))
        choices = [c.choices[0] for c in chunks if c.choices and c.choices[0].text]
        assert all(c.logprobs is not None for c in choices)
        texts.append("".join(c.text for c in choices))
    assert texts[0] == texts[1]


def test_probabilities_after_sampling_are_not_drafted(pair: tuple[Server, Server]) -> None:
    body = {"prompt": PROMPT, "n_predict": 24, "temperature": 0.8, "seed": 7, "n_probs": 3, "post_sampling_probs": True}
    without, drafted = (server.post("/completion", **body) for server in pair)
    assert "draft_n" not in drafted["timings"]
    assert drafted["completion_probabilities"] == without["completion_probabilities"]
