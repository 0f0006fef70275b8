#!/usr/bin/env python3
"""Which residency policy, half-life, margin, pinned share and slots per layer: recorded routing replayed in a simulator.

Method: pyspark_moe/simulator.py replays traces (policy_scenarios.py: real text through the demo model, text sampled from the
benchmark model, synthetic routing of 40 layers of 256 experts) token by token. Its RAM policy is held against a real
store's counters here (question "store") and in tests/python/test_trace_capture.py. Hit rates leave out the first 256
tokens unless the name says otherwise. Nothing is timed. `--questions` runs some of them into a file of their own;
`policy_plots.py` draws the result.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import common
import numpy as np
import policy_scenarios as scenarios
from policy_scenarios import Scenario

from pyspark_moe import device_placement, placement
from pyspark_moe.placement import ResidencyPlan
from pyspark_moe.simulator import Belady, Device, Lru, Policy, Ram, Simulation, Static, simulate

CHOSEN = 64.0  # tokens of half-life in every question but the first, where anything from 32 to 64 is as good
HALF_LIVES = (16.0, 32.0, 48.0, 64.0, 128.0, 256.0, 512.0, 2048.0)
SETTLE = 256  # tokens
SHARES = (0.2, 0.4, 0.6)
SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "demo": scenarios.demo,
    "limit": scenarios.limit,
    "synthetic-500": lambda: scenarios.synthetic(500, 3000),
    "synthetic-4000": lambda: scenarios.synthetic(4000, 3000),
    "synthetic-500-skew": lambda: scenarios.synthetic(500, 3000, n_layer=12, layer_skew=(0.0, 1.5)),
    **{f"demo-{d}": (lambda d=d: scenarios.demo_domain(d)) for d in scenarios.DOMAINS},
}
Job = Callable[..., Any]


@cache
def scenario(name: str) -> Scenario:
    return SCENARIOS[name]()


def rates(result: Simulation) -> dict[str, float]:
    return {"hit_rate": round(result.hit_rate_after(SETTLE), 4), "first_192": round(float(result.hits[:3].sum() / result.uses[:3].sum()), 4)}


def run(name: str, share: float, policy: Policy, plan: ResidencyPlan | None = None) -> Simulation:
    s = scenario(name)
    return simulate(s.test, plan or s.plan(s.slots(share)), policy, s.expert_bytes)


def policies() -> list[tuple[str, Policy]]:
    named: list[tuple[str, Policy]] = [("lru", Lru()), ("belady", Belady()), ("static", Static())]
    return named + [(f"frequency-{h:g}", Ram(half_life=h)) for h in HALF_LIVES]


def ask_policy(name: str, share: float) -> dict[str, Any]:
    """Policies at one share of the experts, no profile; static: the hottest of the profile."""
    s = scenario(name)
    result = {}
    for label, policy in policies():
        plan = s.plan(s.slots(share), counts=s.train.counts()) if isinstance(policy, Static) else None
        done = run(name, share, policy, plan)
        mb = round(done.bytes_per_token / 1e6, 3)
        result[label] = {**rates(done), "mb_per_token": mb, "over_time": [None if np.isnan(x) else round(float(x), 4) for x in done.over_time]}
    return result


def ask_margin(name: str, share: float) -> dict[str, Any]:
    """In RAM: always admit a missed expert (0), or only one that is so many times hotter than the coldest."""
    return {f"{m:g}": rates(run(name, share, Ram(half_life=CHOSEN, admit_margin=m))) for m in (0.0, 1.0, 1.25, 2.0)}


def ask_profile(name: str, share: float) -> dict[str, Any]:
    """How many tokens a profile should count for: of the same traffic, and of other traffic."""
    s = scenario(name)
    own = s.train.counts()
    other = own[:, np.random.default_rng(1).permutation(own.shape[1])]
    if name.startswith("demo-"):
        other = scenario("demo-prose" if name != "demo-prose" else "demo-code").train.counts()
    result = {"none": rates(run(name, share, Ram(half_life=CHOSEN)))}
    for kind, counts in (("own", own), ("other", other)):
        for tokens in (0, 16, 32, 64, 128, 256, 1024):
            plan = s.plan(s.slots(share), counts=counts, prior_tokens=tokens)
            result[f"{kind}-{tokens}"] = rates(run(name, share, Ram(half_life=CHOSEN), plan))
    return result


def ask_pinned(name: str, share: float) -> dict[str, Any]:
    """Part of the slots that keep the hottest of the profile for good, the rest being the ring."""
    s = scenario(name)
    counts = s.train.counts()
    plans = {p: s.plan(s.slots(share), counts=counts, prior_tokens=CHOSEN, pinned=p) for p in (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)}
    return {f"{p:g}": rates(run(name, share, Ram(half_life=CHOSEN), plan)) for p, plan in plans.items()}


def blended(counts: np.ndarray) -> np.ndarray:
    """Each layer's uses by rank, half its own and half the mean over layers, so that a layer's slots stay near the mean."""
    share = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    mean = np.sort(share, axis=1)[:, ::-1].mean(axis=0)
    ranks = np.argsort(np.argsort(-share, axis=1, kind="stable"), axis=1)
    return (share + mean[ranks]) / 2


def ask_layers(name: str, share: float) -> dict[str, Any]:
    """The same bytes as the same slots in every layer, or by uses per byte; in RAM, and on a device in pages of 2 MiB."""
    s = scenario(name)
    counts = s.train.counts().astype(float)
    result: dict[str, Any] = {}
    for where, budget in (
        ("ram", placement.resident_bytes(s.layers, s.slots(share))),
        ("device", sum(device_placement.slot_bytes(layer, n) for layer, n in zip(s.layers, s.slots(share)))),
    ):
        for label, uses in (("uniform", None), ("greedy", counts), ("blended", blended(counts))):
            hotness = None if uses is None else {layer.layer: row for layer, row in zip(s.layers, uses)}
            floor = s.test.n_used
            if where == "ram":
                slots = placement.uniform_slots(s.layers, budget, floor) if hotness is None else placement.greedy_slots(s.layers, budget, floor, hotness)
            else:
                slots = device_placement.uniform_slots(s.layers, budget) if hotness is None else device_placement.greedy_slots(s.layers, budget, floor, hotness)
            assert slots is not None
            if min(slots) == max(layer.n_expert for layer in s.layers):
                continue  # experts of a small model fit the pages that any slots take
            done = run(name, share, Ram(half_life=CHOSEN), s.plan(slots, counts=counts, prior_tokens=CHOSEN))
            result[f"{where}-{label}"] = {**rates(done), "slots": sum(slots), "fewest": min(slots), "most": max(slots)}
    return result


def ask_prompts(name: str, share: float) -> dict[str, Any]:
    """Decoding after prompts of 512 tokens in one micro-batch, against the same prompts token by token, and none."""
    parts = list(scenarios.demo_domains().values()) if name == "demo" else [scenario(name).train, scenario(name).test]
    s = scenario(name)
    result: dict[str, Any] = {}
    for label, ubatch in (("one batch", 512), ("128 at a time", 128), ("token by token", 1), ("not read", 0)):
        routing, is_decoded = scenarios.with_prompts(parts, 512, 128, ubatch or 512)
        if not ubatch:
            routing = scenarios.joined([type(routing)(routing.experts[is_decoded], np.arange(int(is_decoded.sum()) + 1), routing.n_expert)])
            is_decoded = np.ones(routing.n_tokens, dtype=bool)
        for h, by_position in ((CHOSEN, False), (512.0, False), (CHOSEN, True)):
            if by_position and ubatch < 2:
                continue
            policy = Ram(half_life=h, by_position=by_position)
            done = simulate(routing, scenarios.plan_of(s.layers, s.slots(share)), policy, window=1)
            first = is_decoded & (np.cumsum(is_decoded) % 128 < 32) & (np.cumsum(is_decoded) > 0)
            pick = {"decoding": is_decoded, "first 32": first}
            result[f"{label}, half-life {h:g}" + ", by position" * by_position] = {k: round(float(done.hits[m].sum() / done.uses[m].sum()), 4) for k, m in pick.items()}
    return result


def ask_device(name: str, share: float) -> dict[str, Any]:
    """A device's swap engine: missed bytes are read by steps, copied bytes share their bus."""
    result = {}
    for h in (32.0, 64.0, 128.0, 512.0):
        for margin, copies in ((1.0, 0.5), (1.25, 0.5), (2.0, 0.5), (1.25, 0.25), (1.25, 1.0), (1.25, 2.0)):
            s = scenario(name)
            done = run(name, share, Device(half_life=h, margin=margin, copies_per_read=copies), s.plan(s.slots(share), counts=s.train.counts(), prior_tokens=CHOSEN))
            copied = done.moves * s.expert_bytes[0] / 1e6 / s.test.n_tokens
            missed = done.bytes_per_token / 1e6 - copied
            result[f"half-life {h:g}, margin {margin:g}, copies {copies:g}"] = {**rates(done), "missed_mb": round(missed, 2), "copied_mb": round(copied, 2)}
    return result


def ask_store() -> dict[str, Any]:
    """bench_limit.py's requests at 1.5 GiB on a real store, recorded; the simulator on the same steps, and what others hit."""
    from bench_limit import MODEL

    from pyspark_moe import SparkConfig
    from pyspark_moe.model_info import read_model_info
    from pyspark_moe.routing_recorder import RecordedLlama, Recorder, trace_header
    from pyspark_moe.routing_trace import TraceWriter, read_trace

    path = scenarios.FOLDER / "limit-store.trace"
    text = json.loads(scenarios.HELDOUT.read_text(encoding="utf-8").splitlines()[0])["text"][:60]
    marks = []
    with TraceWriter(path, trace_header(read_model_info(MODEL))) as writer:
        options = {"n_ctx": 512, "n_batch": 128, "n_ubatch": 128, "n_threads": 2, "verbose": False}
        with RecordedLlama(MODEL, recorder=Recorder(writer), spark=SparkConfig(ram_gib=1.5, profile="none"), **options) as llm:
            for prompt, n in ((text, 8), (text[:30], 24)):
                marks.append(llm.spark.stats())
                tokens = llm.generate(llm.tokenize(prompt.encode()), temp=0.0)
                for _ in range(n):
                    next(tokens)
                llm.spark.wait_idle(20)
            last, plan = llm.spark.stats(), llm.spark.decision.plan
    routing = read_trace(path).routing
    result: dict[str, Any] = {
        "slots": plan.layers[0].n_fast, "real_hits": last.hits, "real_uses": last.uses,
        "real_timed_hit_rate": round((last.hits - marks[1].hits) / (last.uses - marks[1].uses), 4),
    }  # fmt: skip
    for label, policy in (("store's policy", Ram(half_life=512)), ("half-life 64", Ram(half_life=64)), ("lru", Lru()), ("belady", Belady())):
        done = simulate(routing, plan, policy, window=1)
        first = int(np.searchsorted(done.uses.sum(axis=1).cumsum(), marks[1].uses)) + 1  # after the last step before the mark
        result[label] = {"hits": int(done.hits.sum()), "timed_hit_rate": round(float(done.hits[first:].sum() / done.uses[first:].sum()), 4)}
    return result


LARGE = ("demo", "limit", "synthetic-500", "synthetic-4000")
DOMAIN_NAMES = tuple(f"demo-{d}" for d in scenarios.DOMAINS)
QUESTIONS: dict[str, tuple[Job, list[tuple[Any, ...]]]] = {
    "policy": (ask_policy, [(n, s) for n in LARGE for s in SHARES]),
    "margin": (ask_margin, [(n, s) for n in LARGE for s in (0.2, 0.6)]),
    "profile": (ask_profile, [(n, 0.4) for n in (*DOMAIN_NAMES, "limit", "synthetic-500-skew")]),
    "pinned": (ask_pinned, [(n, 0.4) for n in (*DOMAIN_NAMES, "limit", "synthetic-500-skew")]),
    "layers": (ask_layers, [(n, s) for n in (*DOMAIN_NAMES, "limit", "synthetic-500", "synthetic-500-skew") for s in (0.25, 0.6)]),
    "prompts": (ask_prompts, [("demo", 0.4), ("demo", 0.6), ("synthetic-500-skew", 0.4)]),
    "device": (ask_device, [(n, 0.6) for n in LARGE]),
    "store": (ask_store, [()]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    load_before = common.load_average()
    for name in ("demo", "limit"):
        scenario(name)  # recorded before processes share the traces
    results: dict[str, dict[str, Any]] = {}
    # spawned: a process that is forked after llama.cpp has run hangs in it
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        jobs = [(q, args_of, pool.submit(QUESTIONS[q][0], *args_of)) for q in args.questions for args_of in QUESTIONS[q][1]]
        for question, given, job in jobs:
            label = " ".join(f"{x:g}" if isinstance(x, float) else x for x in given) or "limit"
            results.setdefault(question, {})[label] = job.result()
            common.progress(f"{question}: {label}")
    settings = {"questions": args.questions, "settle": SETTLE, "chosen_half_life": CHOSEN, "demo_tokens": scenarios.DEMO_TOKENS, "limit_topics": scenarios.LIMIT_TOPICS}
    common.save("policy-" + "-".join(args.questions), method=(__doc__ or "").strip(), settings=settings, results=results, rounds={}, load_before=load_before)


if __name__ == "__main__":
    main()
