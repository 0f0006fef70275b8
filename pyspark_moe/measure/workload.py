"""Paired speed: what every server is asked in a round, and what one of them does with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from . import rates

Tokens = tuple[int, ...]
CURVE_EVERY = 16  # tokens between two readings of the counters, while speed is not measured
P = TypeVar("P")
_PREFILL_RATES = ("hit_rate", "bytes_home_per_token", "bytes_ahead_per_token", "bytes_read_per_token")


class Asked(Protocol):
    """A server that completes prompts; see MeasuredServer.complete. Answers have at least first_s, total_s, n_tokens,
    decode_per_s, n_prompt and prompt_per_s."""

    def complete(self, prompt: Sequence[int], n: int, *, watch: Callable[[], None] | None = None, every: int = 0) -> Any: ...


Counters = Callable[[], Mapping[str, Any] | None]  # of a store, over all layers; None for a server without one


@dataclass(frozen=True)
class Workload(Generic[P]):
    """What is sent. Every arm gets the same in the same round, and every round something else, as far as prompts go round.

    prompts             token ids; tokens_of() of a subclass says how where they are something else
    n_prompt, n_decode  tokens of a decode request; n_requests of them a round
    n_prefill           tokens of a prefill request; n_prefills of them a round
    n_warm              requests that our servers get before they are measured, with prompts of their own
    """

    prompts: Sequence[P]
    n_prompt: int
    n_decode: int
    n_requests: int
    n_prefill: int
    n_prefills: int
    n_warm: int

    def tokens_of(self, prompt: P) -> Tokens:
        return tuple(prompt)  # type: ignore[arg-type]

    def _measured(self) -> Sequence[P]:
        return self.prompts[: -self.n_warm] if 0 < self.n_warm <= len(self.prompts) // 2 else self.prompts

    def warm(self) -> list[Tokens]:
        return [self.tokens_of(self.prompts[-1 - i % len(self.prompts)])[: self.n_prompt] for i in range(self.n_warm)]

    def decode(self, number: int) -> list[Tokens]:
        """Prompts of round `number`, from 0."""
        pool = self._measured()
        return [self.tokens_of(pool[(number * self.n_requests + i) % len(pool)])[: self.n_prompt] for i in range(self.n_requests)]

    def prefill(self, number: int) -> list[Tokens]:
        """The same for prefill: prompts one after the other until they are long enough."""
        pool, result = self._measured(), []
        at = number * self.n_prefills
        for _ in range(self.n_prefills):
            tokens: list[int] = []
            i = at
            while len(tokens) < self.n_prefill:
                tokens += self.tokens_of(pool[i % len(pool)])
                i += 1
            at += 1
            result.append(tuple(tokens[: self.n_prefill]))
        return result


def measure_round(
    server: Asked, counters: Counters, work: Workload[Any], number: int, uses_per_token: int, done: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], list[Any], list[Any]]:
    """(metrics, answers of the decode requests, answers of the prefill requests) of round `number`, from 0. Counters of decoding
    are read after the first token and after the last one, so prompts are not in them. done: called after each request."""
    answers: list[Any] = []
    counts = []
    for tokens in work.decode(number):
        readings: list[Mapping[str, Any] | None] = []
        answers.append(server.complete(tokens, work.n_decode, watch=lambda: readings.append(counters())))
        last = counters()
        if readings and readings[0] and last:
            counts.append(rates.between(readings[0], last))
        done()
    before = counters()
    prefills: list[Any] = []
    for tokens in work.prefill(number):
        prefills.append(server.complete(tokens, 1))
        done()
    after = counters()
    metrics = {
        "decode_per_s": statistics.median(a.decode_per_s for a in answers),
        "wall_decode_per_s": sum(a.n_tokens - 1 for a in answers) / max(1e-9, sum(a.total_s - a.first_s for a in answers)),
        "ttft_ms": 1000 * statistics.median(a.first_s for a in answers),
        "prefill_per_s": statistics.median(a.prompt_per_s for a in prefills),
        "prefill_ttft_ms": 1000 * statistics.median(a.first_s for a in prefills),
    }
    if counts and rates.add(counts)["uses"]:
        metrics |= rates.per_token(rates.add(counts), uses_per_token)
    if before and after and after["uses"] > before["uses"]:
        found = rates.per_token(rates.between(before, after), uses_per_token)
        metrics |= {f"prefill_{name}": found[name] for name in _PREFILL_RATES if name in found}
    return metrics, answers, prefills


def follow(
    server: Asked,
    counters: Counters,
    prompts: Sequence[Tokens],
    n: int,
    uses_per_token: int,
    stop: Callable[[list[dict[str, float]]], bool] = lambda _: False,
    done: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """The hit rate as a curve over the tokens of requests, one after the other, until stop(curve) or none is left; [] without
    a store. done: called after each request."""
    points: list[dict[str, float]] = []
    for tokens in prompts:
        readings: list[Mapping[str, Any] | None] = []
        server.complete(tokens, n, watch=lambda: readings.append(counters()), every=CURVE_EVERY)
        readings.append(counters())
        points += rates.curve([r for r in readings if r], uses_per_token, points[-1]["tokens"] if points else 0.0)
        done()
        if stop(points):
            break
    return points
