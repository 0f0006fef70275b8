"""Speed of a model at several budgets, of every expert resident, and of llama-server's own offload: paired rounds, the same prompts.

A round asks every arm the same requests, one arm at a time, in turned order every second round; the next round has other prompts. Where memory
allows, servers stay loaded and only take turns; else each is started and warmed up again in every round. What is found is
written after every arm of every round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import GIB
from ..errors import EngineError, MeasurementError, RefusedError
from ..history import Conversation
from . import bench_arms, device_memory, sizes
from .bench_arms import Arm, Setup
from .bench_results import Found, metrics_of, results, unequal
from .limits import Limits
from .paired import in_turn
from .prompts import make_prompts
from .results import ResultFile
from .server import MeasuredServer
from .validate import private_copy
from .workload import Workload, follow, measure_round

_TRIES = 4  # to find --n-cpu-moe


@dataclass(frozen=True)
class Work:
    """rounds of n_requests requests of n_prompt tokens, after each of which n_tokens are generated, and n_prefills prompts of
    n_prefill tokens; n_warm requests of the first kind before a store is measured."""

    rounds: int
    n_requests: int
    n_prompt: int
    n_tokens: int
    n_prefills: int
    n_prefill: int
    n_warm: int

    @property
    def n_ctx(self) -> int:
        """Tokens of a context that holds each request."""
        return -(-(max(self.n_prompt + self.n_tokens, self.n_prefill + 1) + 8) // 256) * 256

    def n_asked(self, arms: Sequence[Arm], is_together: bool) -> int:
        """Requests in all, as far as it is known beforehand."""
        warm = sum(1 + (self.n_warm if arm.has_store else 1) for arm in arms)
        return warm * (1 if is_together else self.rounds) + self.rounds * len(arms) * (self.n_requests + self.n_prefills)


@dataclass
class Running:
    """A loaded server that is warm. facts: what is known of it, for the result."""

    server: MeasuredServer
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int | None:
        return self.facts.get("memory_bytes")


class Bench:
    """One run. profile: servers with a store get a copy of it. is_together: servers stay loaded. say: gets a line for each thing that
    happens; done: called after each request."""

    def __init__(
        self, setup: Setup, work: Work, limits: Limits, result: ResultFile, *, profile: Path | None = None, is_together: bool = True,
        say: Callable[[str], None], done: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.setup, self.work, self.limits, self.result = setup, work, limits, result
        self.arms = list(bench_arms.make_arms(setup))
        self.profile, self.is_together = profile, is_together
        self._say, self._done = say, done
        self._uses_per_token = len(setup.model.layers) * setup.model.n_expert_used
        self._conversations: Iterator[Conversation] = iter(())
        self._workload: Workload[tuple[int, ...]] | None = None
        self._loaded: dict[str, Running] = {}
        self._n_cpu_moe: dict[str, int] = {}
        self.found = Found(tuple(self.arms))

    def run(self, conversations: Iterator[Conversation]) -> None:
        """All rounds. Raises MeasurementError at the end when tokens differ that must be the same, or nothing could be measured, and at
        once EngineError, StalledError, ConfigError."""
        self._conversations = conversations
        try:
            self._run()
        finally:
            self.result.results.update(results(self.found))  # also of an arm that was measured and not written yet
        if not self.found.rounds:
            raise MeasurementError("Nothing could be measured. " + " ".join(f"{name}: {why}" for name, why in self.found.left_out.items()))
        different = unequal(self.found)
        if different:
            raise MeasurementError(
                f"Greedy tokens of {', '.join(different)} are not those of {self.found.reference}: residency must not change them. Please report it."
            )

    def _run(self) -> None:
        with ExitStack() as loaded:
            if self.is_together:
                for arm in self._each(self.arms):
                    with self._may_be_left_out(arm):
                        self._loaded[arm.name] = self._start(arm, loaded)
            for number in range(self.work.rounds):
                for arm in self._each(in_turn(self.arms, number)):
                    with self._may_be_left_out(arm), ExitStack() as now:
                        self._measure(arm, self._loaded.get(arm.name) or self._start(arm, now), number)

    def _each(self, arms: Iterable[Arm]) -> Iterator[Arm]:
        """Those that are not left out by the time it is their turn."""
        return (arm for arm in tuple(arms) if arm in self.arms)

    @contextmanager
    def _may_be_left_out(self, arm: Arm) -> Iterator[None]:
        """What an arm's start may be refused for ends this arm only."""
        try:
            yield
        except (RefusedError, _TooLarge) as e:
            self._say(f"{arm.name} is left out: {e}")
            self.found.left_out[arm.name] = str(e)
            self.arms.remove(arm)
            for other in [other for other in self.arms if other.beside == arm.name]:
                self.found.left_out[other.name] = f"{arm.name}, whose memory it would get, is left out"
                self.arms.remove(other)
            self._keep()

    def _start(self, arm: Arm, stack: ExitStack) -> Running:
        """A server that is warm; `stack` ends it. Raises RefusedError, _TooLarge, EngineError, StalledError."""
        running = self._start_beside(arm, stack) if arm.beside else self._launch(arm, stack)
        self.found.facts.setdefault(arm.name, running.facts)  # of its first start
        self._keep()
        return running

    def _launch(self, arm: Arm, stack: ExitStack) -> Running:
        self._say(f"{arm.name}: loading")
        flags = stack.enter_context(private_copy(self.profile if arm.has_store else None))
        before = device_memory.memory_in_use() if self.setup.on_gpu else None
        try:
            with ExitStack() as this:
                server = this.enter_context(MeasuredServer(arm.name, arm.program, (*arm.flags, *flags), self.limits, is_ours=arm.is_ours))
                running = Running(server, {"start_s": round(server.start_s, 2)})
                self._warm_up(arm, running)
                stack.push(this.pop_all())
        except EngineError as e:
            if arm.may_fail and not isinstance(e, RefusedError):
                raise _TooLarge(_short(str(e))) from None
            raise
        if self.setup.on_gpu:
            running.facts["memory_bytes"], running.facts["memory_method"] = device_memory.process_or_growth(server.pid, before)
        else:
            running.facts["memory_bytes"], running.facts["memory_method"] = server.peak_ram(), "peak resident RAM, pages of the file included"
        placed = server.counters() or {}
        if arm.has_store and "fast_bytes" not in placed:
            raise EngineError(f"The server '{arm.name}' serves without an expert store, although it has --spark.")
        running.facts |= {key: placed[key] for key in ("n_fast", "n_expert", "fast_bytes") if key in placed}
        return running

    def _warm_up(self, arm: Arm, running: Running) -> None:
        """With a store: the requests that the policy adapts to. Others: one, for what they prepare with the first."""
        work, server = self._make_work(running.server), running.server
        prompts = work.warm() if arm.has_store else work.decode(0)[:1]
        points = follow(server, server.counters, prompts, work.n_decode, self._uses_per_token, done=self._done)
        if points:
            running.facts["curve_from_start"] = points
        running.facts["prefill_tokens_processed"] = server.complete(work.prefill(0)[0], 1).n_prompt
        self._done()

    def _make_work(self, server: MeasuredServer) -> Workload[tuple[int, ...]]:
        """What is sent; made once, with the first server's tokenizer."""
        if self._workload is None:
            w = self.work
            prompts = make_prompts(self._conversations, server, w.rounds * w.n_requests + w.n_warm, w.n_prompt)
            self._workload = Workload(prompts, w.n_prompt, w.n_tokens, w.n_requests, w.n_prefill, w.n_prefills, w.n_warm)
            self.result.results["prompts"] = {"number": len(prompts), "tokens": sum(map(len, prompts))}
        return self._workload

    def _start_beside(self, arm: Arm, stack: ExitStack) -> Running:
        """An offload arm with as few layers' experts in RAM as the memory of the arm beside it allows."""
        beside = self.found.facts[arm.beside]
        limit = int(arm.budget.gib * GIB) if arm.budget and arm.budget.gib else beside.get("memory_bytes")
        base = self.found.facts.get(bench_arms.ALL_RESIDENT, {}).get("memory_bytes")
        known = self._n_cpu_moe.get(arm.name)
        m = bench_arms.first_n_cpu_moe(self.setup, arm.budget, beside["fast_bytes"], base, limit) if known is None else known
        too_low = -1
        for left in reversed(range(_TRIES)):
            with ExitStack() as this:
                running = self._launch(arm.with_flags("--n-cpu-moe", str(m)), this)
                memory, better = running.memory_bytes, m
                if known is None and memory is not None and limit is not None:
                    better = bench_arms.next_n_cpu_moe(self.setup, m, memory, limit, too_low)
                if better == m or (left == 0 and memory is not None and memory <= limit):
                    stack.push(this.pop_all())
                    break
            too_low = max(too_low, m) if memory > limit else too_low
            self._say(f"{arm.name}: --n-cpu-moe {m} takes {memory / GIB:.2f} GiB of {limit / GIB:.2f}, trying {better}")
            m = better
        else:
            raise _TooLarge(f"no --n-cpu-moe was found with which it takes at most {limit / GIB:.2f} GiB")
        self._n_cpu_moe[arm.name] = m
        matched = "memory" if memory is not None and limit is not None else "bytes of experts"
        running.facts |= {"n_cpu_moe": m, "expert_bytes_on_gpu": sizes.kept_bytes(self.setup.model.layers, m), "matched_by": matched, "memory_limit_bytes": limit}
        return running

    def _measure(self, arm: Arm, running: Running, number: int) -> None:
        server = running.server
        work = self._make_work(server)
        measured, answers, prefills = measure_round(server, server.counters, work, number, self._uses_per_token, self._done)
        metrics = metrics_of(measured)
        self.found.add(number, arm.name, metrics, [*answers, *prefills])
        facts = self.found.facts[arm.name]  # buffers grow with use
        if not self.setup.on_gpu:
            facts["memory_bytes"] = max(facts["memory_bytes"] or 0, server.peak_ram() or 0)
        elif facts["memory_method"] == "per process":
            facts["memory_bytes"] = max(facts["memory_bytes"], device_memory.process_memory(server.pid) or 0)
        self._keep()
        hits = f", {metrics['hit_rate']:.1%} hits" if "hit_rate" in metrics else ""
        self._say(
            f"round {number + 1} of {self.work.rounds}, {arm.name}: {metrics['decode_per_s']:.1f} tokens/s, {metrics['ttft_ms']:.0f} ms to the first, "
            f"prefill {metrics['prefill_per_s']:.0f} tokens/s{hits}"
        )

    def _keep(self) -> None:
        self.result.results.update(results(self.found))
        self.result.write()


class _TooLarge(Exception):
    """A server that needs not start did not."""


def _short(text: str) -> str:
    """The first sentence of an engine's end and what looks like its reason."""
    first, *lines = text.splitlines()
    reasons = [line.strip() for line in lines if re.search(r"error|fail|memory", line, re.IGNORECASE)]
    return f"{first.removesuffix(' Its last lines:')} {(reasons or lines or [''])[0].strip()}".strip()
