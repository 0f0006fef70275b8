"""What bench_cuda.py runs: prompts, servers that stay loaded, and what one of them measures in a round."""
from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuda_device
import cuda_plan
from pyspark_moe.measure import workload
from pyspark_moe.measure.workload import Tokens
from servers import Failed, Server, prompts_from


@dataclass(frozen=True)
class Prompt:
    tokens: Tokens
    topic: int | None = None


def parse_prompts(value: Any) -> list[Prompt]:
    """Prompts from JSON: a list of token lists or of {"topic": k, "tokens": [...]}. Raises ValueError."""
    prompts = []
    for number, entry in enumerate(value.get("prompts", []) if isinstance(value, dict) else value):
        tokens, topic = (entry.get("tokens"), entry.get("topic")) if isinstance(entry, dict) else (entry, None)
        if not isinstance(tokens, list) or not tokens or not all(type(t) is int for t in tokens):
            raise ValueError(f'prompt {number} is not a list of token ids, nor {{"topic": k, "tokens": [...]}} with one')
        prompts.append(Prompt(tuple(tokens), topic))
    if not prompts:
        raise ValueError("there are no prompts")
    return prompts


def random_prompts(n: int, n_tokens: int, n_topics: int, n_vocab: int, seed: int = 0) -> list[Prompt]:
    """Prompts for models of scripts/make_synthetic_moe.py, in which a token's topic is id * n_topics // n_vocab; topics in turn."""
    rng = random.Random(seed)
    result = []
    for i in range(n):
        topic = i % n_topics
        ids = range(-(-topic * n_vocab // n_topics), -(-(topic + 1) * n_vocab // n_topics))
        result.append(Prompt(tuple(rng.choices(ids, k=n_tokens)), topic))
    return result


def text_prompts(path: Path, server: Server, n: int, characters: int = 1000) -> list[Prompt]:
    """Held-out documents as the server's model tokenizes them."""
    return [Prompt(tuple(server.tokenize(text))) for text in dict.fromkeys(prompts_from(path, n, characters))]


def read_prompts(path: Path) -> list[Prompt]:
    """Raises ValueError, OSError."""
    try:
        return parse_prompts(json.loads(path.read_text()))
    except ValueError as e:
        raise ValueError(f"'{path}': {e}") from e


@dataclass(frozen=True)
class Workload(workload.Workload[Prompt]):
    """The same with topics."""

    def tokens_of(self, prompt: Prompt) -> Tokens:
        return prompt.tokens

    def topics(self) -> list[int]:
        return sorted({p.topic for p in self.prompts if p.topic is not None})

    def of_topic(self, topic: int) -> list[Tokens]:
        return [p.tokens[: self.n_prompt] for p in self.prompts if p.topic == topic]


@dataclass(frozen=True)
class Arm:
    """A server to start. share or budget_gib: how ours is sized; None for stock."""

    name: str
    program: tuple[str, ...]
    flags: tuple[str, ...]
    is_ours: bool = False
    share: float | None = None
    budget_gib: float | None = None

    @property
    def command(self) -> list[str]:
        return [*self.program, *self.flags]


@dataclass
class Running:
    """A loaded server. uses_per_token: MoE layers x experts used."""

    arm: Arm
    server: Server
    uses_per_token: int
    memory_bytes: int | None = None
    memory_method: str = "none"
    start_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    texts: list[list[str]] = field(default_factory=list)  # answers of each round

    def total(self) -> dict[str, Any] | None:
        """Our counters over all layers; None for a server without a store."""
        stats = self.server.get("/spark/stats") if self.arm.is_ours else None
        return stats.get("total") if stats else None

    def measure(self, work: Workload) -> dict[str, float]:
        """One round. Counters of decoding are read after the first token and after the last one, so prompts are not in them."""
        metrics, answers, _ = workload.measure_round(self.server, self.total, work, len(self.texts), self.uses_per_token)
        self.texts.append([answer.text for answer in answers])
        return metrics

    def follow(self, prompts: Sequence[Tokens], n: int, stop: Callable[[list[dict[str, float]]], bool]) -> list[dict[str, float]]:
        """The hit rate as a curve over the tokens of requests, one after the other, until stop(curve) or none is left."""
        return workload.follow(self.server, self.total, prompts, n, self.uses_per_token, stop)

    def warm_up(self, work: Workload) -> None:
        """Ours: the requests that the policy adapts to, with the curve from a fresh start. Stock: one, for its graphs."""
        prompts = work.warm() if self.arm.is_ours else work.warm()[:1]
        points = self.follow(prompts, work.n_decode, lambda _: False)
        if points:
            self.facts["curve_from_start"] = points
        for tokens in work.prefill(0)[:1]:
            self.facts["prefill_tokens_processed"] = self.server.complete(tokens, 1).n_prompt

    def change_topic(self, work: Workload, is_late: Callable[[], bool], most: int = 8) -> dict[str, Any]:
        """Topic after topic, each until its hit rate is steady or `most` requests were sent: the curves, and how soon the
        second topic comes back to its own level."""
        old, new = work.topics()[:2]

        def some(prompts: list[Tokens]) -> list[Tokens]:
            return [prompts[i % len(prompts)] for i in range(most)]

        def stop(points: list[dict[str, float]]) -> bool:
            return is_late() or cuda_plan.is_steady(points)

        before = self.follow(some(work.of_topic(old)), work.n_decode, stop)
        after = self.follow(some(work.of_topic(new)), work.n_decode, stop)
        steady = cuda_plan.level(after, 128) or cuda_plan.level(after, 32)
        return {
            "topics": [old, new],
            "steady_before": cuda_plan.level(before, 128) or cuda_plan.level(before, 32),
            "first_after": after[0]["hit_rate"] if after else None,
            "steady_after": steady,
            "recovery_tokens": cuda_plan.recovery_tokens(after, steady),
            "before": before,
            "after": after,
        }

    def read_memory(self) -> None:
        """The driver's own figure again, where it has one: buffers grow with use."""
        if self.memory_method == "per process":
            self.memory_bytes = max(self.memory_bytes or 0, cuda_device.process_memory(self.server.process.pid) or 0)


def start(arm: Arm, work: Callable[[Server], Workload], uses_per_token: int, timeout_s: float) -> Running:
    """Starts a server, warms it up, then measures its memory. work: the workload, once there is a server to tokenize with.
    Raises Failed, OSError."""
    before = cuda_device.memory_in_use()
    begin = time.monotonic()
    server = Server(arm.program, arm.flags, timeout_s=timeout_s)
    try:
        running = Running(arm, server, uses_per_token)
        running.start_s = round(time.monotonic() - begin, 2)
        if arm.is_ours and running.total() is None:
            raise Failed(f"{arm.name} serves without an expert store: {server.get('/spark/stats')}\n{server.log_tail()}")
        running.warm_up(work(server))
        running.memory_bytes, running.memory_method = cuda_device.process_or_growth(server.process.pid, before)
        stats = running.total()
        if stats:
            running.facts |= {key: stats[key] for key in ("n_fast", "n_expert", "fast_bytes", "n_resident")}
        return running
    except BaseException:
        server.close()
        raise


def same_text(arm: Running, base: Running) -> float | None:
    """Share of answers that are the base's, over the rounds both have; None without rounds."""
    pairs = [a == b for mine, theirs in zip(arm.texts, base.texts) for a, b in zip(mine, theirs)]
    return sum(pairs) / len(pairs) if pairs else None


def medians(rounds: Sequence[Mapping[str, Mapping[str, float]]], arm: str) -> dict[str, float]:
    """Of every metric that the arm has in all rounds."""
    names = [name for name in rounds[0][arm] if all(name in r[arm] for r in rounds)]
    return {name: statistics.median(r[arm][name] for r in rounds) for name in names}
