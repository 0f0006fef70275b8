"""What one server does with prompts, one after the other: its answers, and what its counters say about their tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import rates
from .prompts import Prompt
from .server import Answer, MeasuredServer

CURVE_EVERY = 16  # tokens between two readings of the counters, while speed is not measured
BYTES = ("bytes_read", "bytes_home", "bytes_ahead")


@dataclass
class Decoding:
    """Requests that were decoded, in order. counts: of each, what was counted while it decoded, its prompt excluded; None
    without a store. n_warm: the first of them, which are not measured. curve: hit rate over the tokens of these."""

    uses_per_token: int
    n_warm: int
    answers: list[Answer] = field(default_factory=list)
    counts: list[dict[str, int] | None] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)

    def decode(self, server: MeasuredServer, prompts: Sequence[Prompt], n: int, done: Callable[[], None] = lambda: None) -> None:
        """Has the server decode n tokens after each prompt. done: called after each. Raises EngineError, StalledError."""
        for prompt in prompts:
            is_warm = len(self.answers) < self.n_warm
            readings: list[dict[str, Any] | None] = []
            watch = (lambda: readings.append(server.counters())) if server.is_ours else None
            self.answers.append(server.complete(prompt, n, watch=watch, every=CURVE_EVERY if is_warm else 0))
            if watch:
                watch()
            known = [reading for reading in readings if reading]
            self.counts.append(rates.between(known[0], known[-1]) if len(known) > 1 else None)
            if is_warm:
                self.curve += rates.curve(known, self.uses_per_token, self.curve[-1]["tokens"] if self.curve else 0.0)
            done()

    def as_dict(self) -> dict[str, Any]:
        """Warm-up and steady state apart, and every request."""
        return {
            "warm_up": self._part(slice(0, self.n_warm)),
            "steady": self._part(slice(self.n_warm, None)),
            "curve_of_warm_up": self.curve,
            "requests": [self._request(answer, counts) for answer, counts in zip(self.answers, self.counts)],
        }

    def _part(self, which: slice) -> dict[str, Any]:
        answers, counts = self.answers[which], self.counts[which]
        if not answers:
            return {"requests": 0}
        tokens = sum(answer.n_tokens for answer in answers)
        result: dict[str, Any] = {
            "requests": len(answers),
            "tokens": tokens,
            "decode_per_s": statistics.median(answer.decode_per_s for answer in answers),
            "ttft_ms": 1000 * statistics.median(answer.first_s for answer in answers),
        }
        known = [c for c in counts if c and c["uses"]]
        if known:
            result |= summary(rates.add(known), self.uses_per_token)
        return result

    def _request(self, answer: Answer, counts: dict[str, int] | None) -> dict[str, Any]:
        result = {"tokens": answer.n_tokens, "prompt_tokens": answer.n_prompt, "decode_per_s": round(answer.decode_per_s, 3),
                  "ttft_ms": round(1000 * answer.first_s, 3)}  # fmt: skip
        return result | {name: counts[name] for name in ("uses", "hits", "misses", "promotions", *BYTES) if name in counts} if counts else result


def summary(counts: dict[str, int], uses_per_token: int) -> dict[str, float]:
    """Rates of counts. cold_rate: share of expert uses that were not in a fast slot and came from home; bytes_per_token: what
    a token brought from home, in place, ahead of its layer or into a slot."""
    found = rates.per_token(counts, uses_per_token)
    found["cold_rate"] = counts["misses"] / max(1, counts["uses"])
    found["bytes_per_token"] = sum(found.get(f"{name}_per_token", 0.0) for name in BYTES)
    return found


@dataclass(frozen=True)
class Difference:
    """Where two arms first differ: request and token, from 0; token None where only the text differs."""

    request: int
    token: int | None


def first_difference(a: Sequence[Answer], b: Sequence[Answer]) -> Difference | None:
    """None when all answers are the same."""
    for number, (mine, theirs) in enumerate(zip(a, b)):
        if mine.content != theirs.content:
            n = min(len(mine.tokens), len(theirs.tokens))
            token = next((i for i in range(n) if mine.tokens[i] != theirs.tokens[i]), n if len(mine.tokens) != len(theirs.tokens) else None)
            return Difference(number, token)
    return None if len(a) == len(b) else Difference(min(len(a), len(b)), None)
