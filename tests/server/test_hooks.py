"""What patches/0040 adds to llama-server: questions before loading, notices, routes, and children of a router."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from harness import TARGET, Server

Start = Callable[..., Server]


def test_props_stats_and_budget_say_the_same(start: Start) -> None:
    server = start("-m", TARGET, "--spark", "--spark-slots", 10, "-c", 1024)
    props, stats, budget = server.get("/props"), server.get("/spark/stats"), server.get("/spark/budget")
    assert props["model_path"] == str(TARGET)  # llama-server's own fields are still there
    spark = props["spark"]
    assert spark["active"] and spark["mode"] == "on"
    assert [layer["n_fast"] for layer in spark["layers"]] == [10] * 7 == [layer["n_fast"] for layer in stats["layers"]]
    assert stats["total"]["fast_bytes"] <= spark["bytes"]["fast"]
    assert budget["need_bytes"] == sum(term["bytes"] for term in budget["terms"]) == spark["bytes"]["need"]
    assert re.search(r"^spark: on: --spark, --spark-slots 10$", server.log, re.MULTILINE)


def test_counters_follow_requests(start: Start) -> None:
    server = start("-m", TARGET, "--spark", "--spark-slots", 10, "-c", 1024, "-np", 1)
    before = server.get("/spark/stats")
    server.complete("def f(x):", n=16)
    after = server.get("/spark/stats")
    total = after["total"]
    assert total["uses"] > before["total"]["uses"]
    assert total["uses"] == total["hits"] + total["misses"]
    assert 0 < total["hit_rate"] < 1
    start_resident = before["total"]["n_resident"]  # the warm-up's: counters begin after it
    assert total["promotions"] - total["evictions"] == total["n_resident"] - start_resident and total["n_resident"] <= total["n_fast"] == 70
    assert total["bytes_read"] > 0
    for name in ("uses", "hits", "misses", "promotions", "evictions", "n_resident", "fast_bytes", "bytes_read"):
        assert total[name] == sum(layer[name] for layer in after["layers"]), name
    deadline = time.monotonic() + 10
    while server.get("/spark/stats")["requests"]["finished"] == 0:  # the notice comes after the answer
        assert time.monotonic() < deadline
    requests = server.get("/spark/stats")["requests"]
    assert requests["finished"] == 1 and requests["decoded_tokens"] == 16 and requests["decode_ms"] > 0


def test_a_cancelled_request_is_noticed_too(start: Start) -> None:
    server = start("-m", TARGET, "--spark", "--spark-slots", 10, "-c", 4096, "-np", 1)
    events = server.stream("/completion", prompt="Once", n_predict=3000, temperature=0, ignore_eos=True)
    next(events)
    events.close()
    deadline = time.monotonic() + 20
    while server.get("/spark/stats")["requests"]["finished"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.get("/spark/stats")["requests"]["decoded_tokens"] < 3000


def test_spark_routes_obey_the_api_key(start: Start) -> None:
    server = start("-m", TARGET, "--spark", "--spark-slots", 10, "-c", 512, api_key="secret")
    for path in ("/spark/stats", "/spark/budget", "/props"):
        assert httpx.get(server.url + path).status_code == 401, path
        assert server.http.get(path).status_code == 200, path


def test_without_residency_the_routes_answer_why(start: Start) -> None:
    server = start("-m", TARGET, "--no-spark", "-c", 512)
    assert server.get("/props")["spark"] == {"active": False, "why": "--no-spark"}
    assert server.get("/spark/stats") == {"active": False, "why": "--no-spark"}


def test_automatic_says_that_the_model_fits(start: Start) -> None:
    server = start("-m", TARGET, "-c", 512)
    spark = server.get("/props")["spark"]
    assert spark["mode"] == "auto" and not spark["active"] and "the model fits" in spark["why"]
    assert "spark: off (auto): the model fits" in server.log
    assert "total" not in server.get("/spark/stats")


def test_after_sleep_the_model_gets_a_new_store_and_the_same_text(start: Start) -> None:
    server = start("-m", TARGET, "--spark", "--spark-slots", 10, "-c", 1024, "-np", 1, "--sleep-idle-seconds", 1)
    first = server.complete("import os\n", n=24)
    deadline = time.monotonic() + 30
    while "entering sleep" not in server.log.lower() and "sleeping" not in server.log.lower():
        assert time.monotonic() < deadline, server.log[-2000:]
        time.sleep(0.2)
    assert server.complete("import os\n", n=24) == first
    assert server.log.count("spark: on: --spark, --spark-slots 10") == 2
    assert server.get("/spark/stats")["total"]["uses"] > 0


def test_the_end_is_summed_up(start: Start) -> None:
    server = start("-m", TARGET, "--spark", "--spark-slots", 10, "-c", 512)
    server.complete("x = ", n=8)
    assert server.stop() == 0
    assert re.search(r"^spark: \d+ expert uses, \d+\.\d % hits; \d+ promotions", server.log, re.MULTILINE)


def test_a_router_starts_children_that_know_our_flags(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "demo.gguf").symlink_to(TARGET)
    server = start("--models-dir", folder, "--spark", "--spark-slots", 9, "-c", 512)
    assert "no model is loaded in this process" in server.get("/spark/stats")["why"]
    answer = server.post("/v1/completions", model="demo", prompt="def f(", max_tokens=8, temperature=0)
    assert answer["usage"]["completion_tokens"] == 8
    assert "spark: on: --spark, --spark-slots 9" in server.log  # a line of the child, passed on by the router
    child = re.search(r"--port\n.*?\s(\d+)\n", server.log)
    assert child, server.log[-3000:]
    stats = json.loads(httpx.get(f"http://127.0.0.1:{child[1]}/spark/stats").text)
    assert stats["active"] and stats["total"]["uses"] > 0
    assert server.stop() == 0


@pytest.mark.parametrize("flag", ["--cpu-moe", "--n-cpu-moe"])
def test_flags_that_place_tensors_contradict(start: Start, tmp_path: Path, flag: str) -> None:
    from harness import run_server

    args = ["-m", str(TARGET), "--spark", flag, *(["2"] if flag == "--n-cpu-moe" else []), "--port", "0"]
    done = run_server(args)
    assert done.returncode == 1
    assert "spark: error: --spark places the experts, and so do" in done.stderr
