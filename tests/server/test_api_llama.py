"""llama-server's own routes, and ours under /spark."""
from __future__ import annotations

from collections.abc import Callable

import httpx
import numpy as np
import pytest

from harness import ONE_THREAD, TARGET, Server

CODE = "def add(a, b):\n    return"


def test_completion_streams_what_it_answers(api: Server) -> None:
    whole = api.complete(CODE, 16)
    events = list(api.stream("/completion", prompt=CODE, n_predict=16, temperature=0, cache_prompt=False))
    assert whole and "".join(e["content"] for e in events) == whole and events[-1]["stop"] is True
    assert events[-1]["timings"]["predicted_n"] == 16


def test_tokenize_and_back(api: Server) -> None:
    tokens = api.post("/tokenize", content=CODE)["tokens"]
    assert len(tokens) > 5 and api.post("/detokenize", tokens=tokens)["content"] == CODE
    pieces = api.post("/tokenize", content=CODE, with_pieces=True)["tokens"]
    assert [p["id"] for p in pieces] == tokens


def test_infill(api: Server) -> None:
    answer = api.post("/infill", input_prefix="def add(a, b):\n    return ", input_suffix="\n\nprint(add(1, 2))\n", n_predict=6, temperature=0)
    assert answer["tokens_predicted"] > 0 and isinstance(answer["content"], str)


def test_slot_save_and_restore(api: Server) -> None:
    prompt = api.post("/tokenize", content=CODE * 8)["tokens"]
    options = {"n_predict": 8, "temperature": 0, "id_slot": 0, "return_tokens": True, "cache_prompt": True}
    first = api.post("/completion", prompt=prompt, **options)
    saved = api.post("/slots/0?action=save", filename="state.bin")
    assert saved["n_saved"] >= len(prompt) and saved["n_written"] > 1000
    following = prompt + first["tokens"] + [36]
    unbroken = api.post("/completion", prompt=following, **options)
    assert api.post("/slots/0?action=erase")["n_erased"] > 0
    assert api.post("/slots/0?action=restore", filename="state.bin")["n_restored"] == saved["n_saved"]
    restored = api.post("/completion", prompt=following, **options)
    assert restored["timings"]["prompt_n"] <= 4 and restored["content"] == unbroken["content"]


def test_slots_metrics_and_props(api: Server) -> None:
    api.complete(CODE, 4)
    assert len(api.get("/slots")) == 2
    metrics = {line.split()[0]: float(line.split()[1]) for line in api.http.get("/metrics").text.splitlines() if not line.startswith("#")}
    assert metrics["llamacpp:tokens_predicted_total"] >= 4
    props = api.get("/props")
    assert props["total_slots"] == 2 and props["chat_template"]
    spark = props["spark"]
    assert spark["active"] is True and [layer["n_fast"] for layer in spark["layers"]] == [10] * 7


def test_embeddings(start: Callable[..., Server]) -> None:
    vectors = []
    for slots in (32, 6):
        server = start("-m", TARGET, "--spark", "--spark-slots", slots, "-c", "512", *ONE_THREAD, "--embeddings", "--pooling", "mean")
        answer = server.post("/v1/embeddings", input=["hello world", CODE], model="demo")
        vectors.append(np.asarray([d["embedding"] for d in answer["data"]]))
        assert server.stop() == 0
    assert vectors[0].shape == (2, 256) and vectors[0].std() > 0 and np.array_equal(*vectors)


def test_spark_stats_count(api: Server) -> None:
    before = api.get("/spark/stats")
    api.complete(CODE, 16)
    after = api.get("/spark/stats")
    total, layers = after["total"], after["layers"]
    assert total["uses"] > before["total"]["uses"] and total["uses"] == total["hits"] + total["misses"]
    for name in ("uses", "hits", "misses", "bytes_read", "promotions", "evictions", "n_fast", "n_resident"):
        assert total[name] == sum(layer[name] for layer in layers), name
    assert [layer["layer"] for layer in layers] == list(range(1, 8)) and total["n_fast"] == 70
    assert 0 < total["hit_rate"] < 1


@pytest.mark.parametrize("path", ["/spark/stats", "/spark/budget", "/props"])
def test_our_routes_have_the_key_rule_of_props(api: Server, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        refused = httpx.get(f"{api.url}{path}", headers=headers)
        assert refused.status_code == 401 and "spark" not in refused.text.lower()
    assert api.http.get(path).status_code == 200


def test_routes_without_a_key(start: Callable[..., Server]) -> None:
    server = start("-m", TARGET, "--no-spark", "-c", "512", *ONE_THREAD)
    stats = server.get("/spark/stats")
    assert stats["active"] is False and server.get("/props")["spark"]["active"] is False
    assert server.http.get("/spark/nothing").status_code == 404
    assert server.stop() == 0
