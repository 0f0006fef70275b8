"""Routing that residency policies are compared on: of the demo model, of the benchmark model, and synthetic.

Traces of models are recorded once, into build/bench/traces; recording again gives the same selections up to rounding.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
from bench_limit import MODEL, make_model

from pyspark_moe.demo_model import path as demo_path
from pyspark_moe.model_info import ExpertLayer, read_model_info
from pyspark_moe.placement import LayerPlan, ResidencyPlan, make_plan
from pyspark_moe.routing_trace import Routing, TraceWriter, read_trace

sys.path.insert(0, str(common.ROOT / "scripts"))
from synthetic_moe.traces import Routers  # noqa: E402
from synthetic_moe.writer import model_prompt  # noqa: E402

FOLDER = common.ROOT / "build" / "bench" / "traces"
HELDOUT = common.ROOT / "tests" / "data" / "heldout.jsonl"
DOMAINS = ("py", "code", "prose", "chat")
DEMO_TOKENS = 4000  # of each domain
LIMIT_TOPICS, LIMIT_TOKENS = (3, 17, 40, 9, 22, 58, 31), 300  # sampled from each topic's prompt
LARGE_EXPERT = 1_769_472  # bytes: n_embd 2048, ff 512, Q4_K and Q6_K
Slots = Sequence[int]


@dataclass(frozen=True)
class Scenario:
    """train: routing of the same kind before it, for profiles; test: what is replayed, as decoding unless it says so.
    layers: sizes."""

    name: str
    train: Routing
    test: Routing
    layers: tuple[ExpertLayer, ...]

    @property
    def expert_bytes(self) -> list[int]:
        return [layer.expert_bytes for layer in self.layers]

    def slots(self, share: float) -> list[int]:
        """The same share of every layer's experts."""
        return [round(share * layer.n_expert) for layer in self.layers]

    def plan(self, slots: Slots, *, counts: np.ndarray | None = None, prior_tokens: float = 0, pinned: float = 0.0) -> ResidencyPlan:
        """Slots that begin with the hottest by `counts`, whose uses count as the last `prior_tokens` tokens."""
        hotness = None
        if counts is not None:
            totals = np.maximum(1, counts.sum(axis=1, keepdims=True))
            hotness = {layer.layer: row for layer, row in zip(self.layers, counts * (max(prior_tokens, 1e-9) * self.test.n_used / totals))}
        plan = make_plan(self.layers, slots, hotness=hotness)
        return replace(plan, layers=tuple(replace(p, n_pinned=int(pinned * len(p.initial))) for p in plan.layers))


def joined(parts: Sequence[Routing]) -> Routing:
    """One after the other, as decoding."""
    experts = np.concatenate([p.experts for p in parts])
    return Routing(experts, np.arange(len(experts) + 1, dtype=np.int64), parts[0].n_expert)


def interleaved(parts: Sequence[Routing], n: int) -> Routing:
    """n tokens of each in turn."""
    return joined([p.part(first, min(first + n, p.n_tokens)) for first in range(0, parts[0].n_tokens, n) for p in parts])


def _recorded(path: Path, model: Path, read: Any, **options: Any) -> Routing:
    """The routing of a trace, recorded by read(llm) when there is none."""
    from pyspark_moe.routing_recorder import RecordedLlama, Recorder, trace_header

    if not path.exists():
        common.progress(f"recording {path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with TraceWriter(path, trace_header(read_model_info(model))) as writer:
            with RecordedLlama(model, recorder=Recorder(writer), spark=False, verbose=False, n_threads=2, seed=1, **options) as llm:
                read(llm)
    return read_trace(path).routing


def demo_domains() -> dict[str, Routing]:
    """Real text through the demo model, which was trained on other text of these domains; DEMO_TOKENS of each."""
    documents = [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]

    def reader(domain: str) -> Any:
        def read(llm: Any) -> None:
            left = DEMO_TOKENS
            for document in documents:
                if document["domain"] == domain and left:
                    tokens = llm.tokenize(document["text"].encode())[: min(left, 1024)]
                    llm.read(tokens)
                    left -= len(tokens)

        return read

    return {d: _recorded(FOLDER / f"demo-{d}.trace", demo_path(), reader(d), n_ctx=1024, n_batch=256, n_ubatch=256).in_steps_of(1) for d in DOMAINS}


def demo_layers() -> tuple[ExpertLayer, ...]:
    return read_model_info(demo_path()).layers


def demo() -> Scenario:
    """Sessions of 500 tokens in four domains by turns; the profile is of other documents of all four."""
    parts = list(demo_domains().values())
    half = DEMO_TOKENS // 2
    return Scenario("demo", joined([p.part(0, half) for p in parts]), interleaved([p.part(half, p.n_tokens) for p in parts], 500), demo_layers())


def demo_domain(domain: str) -> Scenario:
    """One domain: the profile is of its first half, the replay of its second."""
    routing, half = demo_domains()[domain], DEMO_TOKENS // 2
    return Scenario(f"demo-{domain}", routing.part(0, half), routing.part(half, routing.n_tokens), demo_layers())


def limit() -> Scenario:
    """The model of bench_limit.py: text it samples at temperature 1, from a prompt of each of seven topics of 64."""
    if not MODEL.exists():
        make_model(MODEL)

    def read(llm: Any) -> None:
        for topic in LIMIT_TOPICS:
            llm.reset()
            llm._ctx.kv_cache_clear()
            tokens = llm.generate(model_prompt(MODEL, topic, 32), temp=1.0, top_k=0, top_p=1.0, min_p=0.0)
            for _ in range(LIMIT_TOKENS):
                next(tokens)
            llm._recorder.check()

    routing = _recorded(FOLDER / "limit.trace", MODEL, read, n_ctx=1024, n_batch=128, n_ubatch=128).in_steps_of(1)
    half = routing.n_tokens // 2
    return Scenario("limit", routing.part(0, half), routing.part(half, routing.n_tokens), read_model_info(MODEL).layers)


def synthetic(topic_tokens: int, n_tokens: int, *, n_layer: int = 40, layer_skew: tuple[float, float] = (1.0, 1.0)) -> Scenario:
    """256 experts a layer, 8 used; text that stays on one of 64 topics for so many tokens on average."""
    routers = Routers.make(n_layer=n_layer, layer_skew=layer_skew)
    train, test = (routers.route(routers.topics_of_text(n_tokens, topic_tokens, seed), seed) for seed in (1, 2))
    layers = tuple(ExpertLayer(i, 256, (LARGE_EXPERT // 3,) * 3) for i in range(n_layer))
    skew = "" if layer_skew == (1.0, 1.0) else f"-skew-{layer_skew[0]:g}-{layer_skew[1]:g}"
    return Scenario(f"synthetic-{topic_tokens}{skew}", train, test, layers)


def with_prompts(parts: Sequence[Routing], n_prompt: int, n_decode: int, ubatch: int) -> tuple[Routing, np.ndarray]:
    """Requests by turns from each part: a prompt in micro-batches, then decoding. Also which tokens are decoded, bool."""
    experts, steps, is_decoded, at = [], [0], [], [0] * len(parts)
    while min(p.n_tokens - n for p, n in zip(parts, at)) >= n_prompt + n_decode:
        for i, part in enumerate(parts):
            experts.append(part.experts[at[i] : at[i] + n_prompt + n_decode])
            at[i] += n_prompt + n_decode
            first = steps[-1]
            steps += [first + min(n_prompt, n) for n in range(ubatch, n_prompt + ubatch, ubatch)] + [first + n_prompt + n for n in range(1, n_decode + 1)]
            is_decoded += [False] * n_prompt + [True] * n_decode
    return Routing(np.concatenate(experts), np.array(steps, dtype=np.int64), parts[0].n_expert), np.array(is_decoded)


def plan_of(layers: Sequence[ExpertLayer], slots: Slots) -> ResidencyPlan:
    """Empty slots."""
    return ResidencyPlan(tuple(LayerPlan(layer.layer, n) for layer, n in zip(layers, slots)))
