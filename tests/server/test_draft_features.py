"""What a request can ask for works as without a draft, and gives the same text: drafted tokens are only ever what the target writes."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import DRAFT, ONE_THREAD, TARGET, Server

CODE = "import os\n\n\ndef read_file(path):\n    with open(path"
PROSE = "The history of the city begins in the year"
COMMON = ["-m", TARGET, "--spark", "--spark-slots", "16", "-c", "4096", "-np", "4", *ONE_THREAD, "--jinja"]


def served(folder: Path, *args: object) -> Server:
    return Server([str(a) for a in (*COMMON, *args)], folder / "server.log")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("drafting"), "--draft", DRAFT, "--verify-width", "7") as server:
        yield server


def accepted(server: Server) -> int:
    return int(server.get("/spark/stats")["draft"]["accepted"])


GRAMMAR = 'root ::= " " [a-z]+ " " [a-z]+ "."'
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}}, "required": ["name", "size"]}


@pytest.mark.parametrize(
    "request_",
    [
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.2, "seed": 11, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.7, "seed": 3, "repeat_penalty": 1.3, "repeat_last_n": 64, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.9, "seed": 5, "mirostat": 2},
        {"temperature": 0, "dry_multiplier": 0.8, "dry_base": 1.75},
        {"temperature": 0, "logit_bias": [[10, -100], [13, 2.5]]},
        {"temperature": 0, "grammar": GRAMMAR},
        {"temperature": 0.8, "seed": 9, "json_schema": SCHEMA},
        {"temperature": 0, "stop": ["return", "as"]},
        {"temperature": 0, "n_probs": 3},
        {"temperature": 0.8, "seed": 2, "n_predict": 1},
        {"temperature": 0, "ignore_eos": True, "n_predict": 200},
    ],
    ids=lambda request: ",".join(key for key in request if key not in ("temperature", "seed")) or "temperature",
)
@pytest.mark.parametrize("prompt", [CODE, PROSE], ids=["code", "prose"])
def test_a_request_has_the_text_it_has_without(plain: Server, drafting: Server, prompt: str, request_: dict[str, Any]) -> None:
    body = {"prompt": prompt, "n_predict": 96, "cache_prompt": False} | request_
    expected, answer = (server.post("/completion", **body) for server in (plain, drafting))
    for key in ("content", "stop_type", "stopping_word", "tokens_predicted"):
        assert answer[key] == expected[key], key
    if "json_schema" in body:
        assert set(json.loads(answer["content"])) == {"name", "size"} or answer["stop_type"] == "limit"


def test_drafts_were_verified_under_a_grammar(drafting: Server) -> None:
    """A grammar that forces long words is one the draft can guess; the block ends where the grammar does."""
    before = accepted(drafting)
    answer = drafting.post("/completion", prompt="1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7 8 9", n_predict=64, temperature=0, grammar='root ::= (" 1 2 3 4 5 6 7 8 9")+ ".end"')
    assert answer["content"].startswith(" 1 2 3") and accepted(drafting) > before


def test_a_chat_with_tools(plain: Server, drafting: Server) -> None:
    tools = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}]
    body = {"messages": [{"role": "user", "content": "Read a.txt"}], "tools": tools, "tool_choice": "required", "temperature": 0, "max_tokens": 128}
    expected, answer = (server.post("/v1/chat/completions", **body)["choices"][0] for server in (plain, drafting))
    for choice in (expected, answer):
        for call in choice["message"].get("tool_calls") or []:
            call.pop("id", None)
    assert answer == expected


def test_the_prompt_cache_is_reused(plain: Server, drafting: Server) -> None:
    first = [server.post("/completion", prompt=CODE, n_predict=48, temperature=0, id_slot=1, ignore_eos=True)["content"] for server in (plain, drafting)]
    longer = CODE + first[0] + "\n\n\ndef write_file(path"
    answers = [server.post("/completion", prompt=longer, n_predict=48, temperature=0, id_slot=1, cache_prompt=True, ignore_eos=True) for server in (plain, drafting)]
    assert first[0] == first[1] and answers[0]["content"] == answers[1]["content"]
    assert answers[1]["timings"]["cache_n"] == answers[0]["timings"]["cache_n"] > 8


def test_eight_streaming_clients_of_which_half_leave(plain: Server, drafting: Server) -> None:
    prompts = [f"{CODE if i % 2 else PROSE}{' ' * (i // 2)}" for i in range(8)]
    expected = [plain.complete(prompt, 64, ignore_eos=True) for prompt in prompts]

    def stream(i: int) -> str:
        text = ""
        with httpx.stream("POST", f"{drafting.url}/completion", timeout=120,
                          json={"prompt": prompts[i], "n_predict": 64, "temperature": 0, "stream": True, "ignore_eos": True, "cache_prompt": False}) as response:  # fmt: skip
            for line in response.iter_lines():
                if line.startswith("data: "):
                    text += json.loads(line[6:]).get("content", "")
                    if i >= 4 and len(text) > 40:
                        break
        return text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(stream, range(8)))
    assert drafting.complete(prompts[0], 64, ignore_eos=True) == expected[0]  # whoever left has left nothing behind
    assert all(len(text) > 40 for text in texts)


def test_the_context_shifts_and_drafting_begins_anew(start: Callable[..., Server]) -> None:
    args = ("-m", TARGET, "--spark", "--spark-slots", "16", "-c", "512", "-np", "1", *ONE_THREAD, "--context-shift")
    before = 0
    server = start(*args, "--draft", DRAFT, "--verify-width", "7")
    answer = server.post("/completion", prompt=CODE, n_predict=900, temperature=0, ignore_eos=True)
    assert answer["tokens_predicted"] == 900 and answer["truncated"] is True
    before = accepted(server)
    assert before > 100
    assert server.complete(PROSE, 64, ignore_eos=True) == start(*args).complete(PROSE, 64, ignore_eos=True)
