"""One run of the server: decides when a model is loaded, owns its store, answers what is asked about it.

Knows no cffi and no HTTP: launch.py carries these calls across the boundary. Its methods are called from several
threads: `model_loading`, `model_loaded` and `shutdown` from the serving thread, the answers from HTTP threads,
`request_finished` from the inference thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .. import standard_streams
from ..bootstrap import find_history, read_history
from ..budget import Serving, format_bytes
from ..config import SparkConfig
from ..decision import Decision, best_slots, decide, keeps_budget, replan
from ..errors import ModelFileError, ModelNotFoundError, SparkError
from ..gpu import read_gpus
from ..memory import MachineMemory, read_machine_memory
from ..model_info import read_model_info
from ..placement import prior_uses
from ..prefill import Prefill
from ..profile_keeper import ProfileKeeper, drifted, hotness_of, open_profile
from ..rebalance import RebalanceLimits, rebalance
from ..residency import needs_placing, open_store, place
from ..store import Store
from .report import PREFIX, as_dict, block, budget_dict, profile_dict, profile_line, slot_lines

ROUTES = ("/spark/stats", "/spark/budget")


def say(text: str) -> None:
    """One line of ours among llama-server's log lines, which go to stderr too."""
    standard_streams.say(f"{PREFIX} {text}")


@dataclass(frozen=True)
class LoadingModel:
    """What llama-server is about to load."""

    path: str
    serving: Serving
    has_overrides: bool


@dataclass
class _Requests:
    """Requests that have ended. Counts are tokens, times are ms."""

    finished: int = 0
    prompt_tokens: int = 0
    decoded_tokens: int = 0
    prompt_ms: float = 0.0
    decode_ms: float = 0.0


class Session:
    """config: what the user asked for. cuda: (has it, the build's sentence about it)."""

    def __init__(
        self,
        config: SparkConfig,
        cuda: tuple[bool, str] = (False, ""),
        read_memory: Callable[[], MachineMemory] = read_machine_memory,
    ) -> None:
        self.config = config
        self._cuda = cuda
        self._read_memory = read_memory
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._decision: Decision | None = None
        self._keeper: ProfileKeeper | None = None
        self._placed_at = 0  # tokens of traffic when experts were last placed
        self._has_read_history = False
        self._rebalance = RebalanceLimits()
        self._requests = _Requests()
        self._why_off = "no model is loaded in this process (a router's children have their own)"

    def model_loading(self, loading: LoadingModel) -> Store | None:
        """Decides about a model and prints the block. The store to serve with, or None. Raises SparkError, OSError."""
        self._replace(None, None)  # the last model is gone, for example after sleep
        if self.config.mode == "off":
            return self._serve_without("--no-spark")
        try:
            if not loading.path:  # llama-server goes on when what -hf or a URL names could not be fetched
                raise ModelNotFoundError("There is no model file: what llama-server was to fetch (-hf, --model-url) did not arrive; its lines above say why.")
            model = read_model_info(loading.path)
        except ModelFileError as e:
            if self.config.mode == "auto" and not self.config.has_budget:
                return self._serve_without(str(e))  # nobody asked for residency, and llama.cpp may know this file
            raise
        file = open_profile(model, self.config)
        profile = file.begin() if file is not None else None
        decision = decide(
            model,
            self._read_memory(),
            self.config,
            loading.serving,
            has_cuda=self._cuda[0],
            cuda_reason=self._cuda[1],
            has_overrides=loading.has_overrides,
            gpus=read_gpus(loading.serving.n_gpu_layers),
            hotness=hotness_of(profile, model),
        )
        store = open_store(loading.path, decision, self.config)
        for line in block(decision):
            say(line)
        keeper = None
        if store is not None and file is not None:
            keeper = ProfileKeeper(file, store, model.n_expert_used, say, profile)
            if file.warning:
                say(f"  note    {file.warning}")
            say(f"  profile {profile_line(file, profile)}")
        self._replace(store, decision, keeper)
        return store

    def n_ctx(self, asked: int) -> int:
        """The context to make, tokens: as asked, or with a GPU what its memory allows when nobody asked (0)."""
        with self._lock:
            decision = self._decision
        return asked or (decision.serving.n_ctx if decision is not None and decision.gpu is not None else 0)

    def contexts_created(self, context: Any = None) -> None:
        """Everything but fast slots is on the GPU: gives the slots what is left. `context`: the model's llama_context, a cffi
        pointer. Raises SparkError."""
        with self._lock:
            store, decision, keeper = self._store, self._decision, self._keeper
        if store is None or decision is None:
            return
        hotness = keeper.hotness if keeper else None
        if needs_placing(decision):
            decision = place(store, decision, self.config, hotness)
            for line in slot_lines(decision):
                say(line)
        if hotness is None and context is not None and not decision.has_all_fast:
            decision = self._learn_from_history(store, decision, keeper, context)
        if store.stats().uses > 0:
            store.reset_stats()  # a warm-up and history are no traffic
        if keeper:
            keeper.ignore()
        with self._lock:
            self._decision = decision

    def _learn_from_history(self, store: Store, decision: Decision, keeper: ProfileKeeper | None, context: Any) -> Decision:
        """Has the model read agent history where the configuration wants that, and places experts by what it used."""
        if self._has_read_history or (keeper is None and self.config.history == "auto"):
            return decision
        history = find_history(self.config)
        self._has_read_history = True
        if history is None:
            return decision
        store.reset_stats()
        with Prefill(context) as reader:
            done = read_history(history, self.config, reader, say)
        if done is None or done.n_tokens == 0:
            return decision
        uses = {layer.layer: store.counts(i) for i, layer in enumerate(store.layers)}
        if keeper:
            keeper.save("history")
        decision = replan(decision, self.config, prior_uses(uses, decision.model.n_expert_used))
        assert decision.plan is not None
        store.place(decision.plan)
        for line in slot_lines(decision):
            say(line)
        return decision

    def _serve_without(self, why: str) -> None:
        self._why_off = why
        say(f"off: {why}")

    def model_loaded(self) -> None:
        """Says what could not be locked, which only loading can tell."""
        with self._lock:
            store, decision = self._store, self._decision
        if store is None or decision is None:
            return
        total = store.stats()
        unlocked = total.fast_bytes - total.locked_bytes
        if self.config.lock_fast and unlocked > 0:
            limit = decision.machine.memlock_bytes
            reason = f"the lock limit is {format_bytes(limit)} (ulimit -l)" if limit is not None else "the system refused"
            note = f"{format_bytes(unlocked)} of {format_bytes(total.fast_bytes)} fast slots are not locked and may be swapped out: {reason}"
            say(f"  note    {note}")
            with self._lock:
                self._decision = replace(decision, notes=decision.notes + (note,))

    def request_finished(self, n_prompt: int, n_decoded: int, prompt_ms: float, decode_ms: float) -> None:
        """Adds a request that has ended. On the inference thread, which waits for this: it counts, and now and then, when
        routing has drifted, moves some slots between layers."""
        with self._lock:
            r = self._requests
            r.finished += 1
            r.prompt_tokens += n_prompt
            r.decoded_tokens += n_decoded
            r.prompt_ms += prompt_ms
            r.decode_ms += decode_ms
            keeper = self._keeper
        if keeper is not None:
            keeper.request_finished()
            self._follow_drift(keeper)

    def _follow_drift(self, keeper: ProfileKeeper) -> None:
        with self._lock:
            store, decision = self._store, self._decision
            n_tokens = self._requests.prompt_tokens + self._requests.decoded_tokens
        if store is None or decision is None or decision.plan is None or decision.plan.policy != "frequency":
            return  # the others say which experts stay
        if decision.has_all_fast or n_tokens - self._placed_at < self._rebalance.tokens:
            return
        self._placed_at = n_tokens
        model, plan = decision.model, decision.plan
        try:
            uses = {layer.layer: store.counts(i) for i, layer in enumerate(store.layers)}
            hotness = drifted(uses, keeper.hotness, model.n_expert_used)
            current = [layer.n_fast for layer in plan.layers]
            slots = rebalance(
                model.layers, current, best_slots(decision, self.config, hotness), hotness, lambda n: keeps_budget(decision, n), self._rebalance
            )
            if slots is None:
                return
            decision = replan(decision, self.config, hotness, slots)
            assert decision.plan is not None
            store.place(replace(decision.plan, layers=tuple(replace(layer, initial=(), hotness=()) for layer in decision.plan.layers)))
        except SparkError as e:
            say(f"experts were not placed anew: {e}")
            return
        moved = sum(max(0, n - c) for n, c in zip(slots, current))
        say(f"routing has drifted: {moved} of {sum(current)} slots moved to layers that use them more")
        with self._lock:
            self._decision = decision

    def shutdown(self) -> None:
        """Says in one line how residency did."""
        with self._lock:
            store, keeper = self._store, self._keeper
        if store is None:
            return
        if keeper is not None:
            keeper.close()
        total = store.stats()
        if total.hit_rate is not None:
            say(
                f"{total.uses} expert uses, {100 * total.hit_rate:.1f} % hits; {total.promotions} promotions, {total.evictions} evictions, "
                f"{format_bytes(total.bytes_read + total.bytes_home + total.bytes_ahead)} read"
            )

    def props(self) -> dict[str, Any]:
        """What is in effect, for /props."""
        with self._lock:
            decision = self._decision
        return as_dict(decision) if decision else self._no_model()

    def answer(self, path: str) -> dict[str, Any]:
        """The JSON of one of ROUTES. Raises KeyError for another path."""
        return {"/spark/stats": self._stats, "/spark/budget": self._budget}[path]()

    def close(self) -> None:
        self._replace(None, None)

    def _replace(self, store: Store | None, decision: Decision | None, keeper: ProfileKeeper | None = None) -> None:
        with self._lock:
            old, self._store, self._decision = self._store, store, decision
            old_keeper, self._keeper = self._keeper, keeper
        if old_keeper is not None:
            old_keeper.close()
        if old is not None:
            old.close()  # waits for answers that still read it

    def _no_model(self) -> dict[str, Any]:
        return {"active": False, "why": self._why_off}

    def _stats(self) -> dict[str, Any]:
        with self._lock:
            store, decision, keeper, requests = self._store, self._decision, self._keeper, replace(self._requests)
        if decision is None:
            return self._no_model()
        result: dict[str, Any] = {
            "active": decision.is_on,
            "why": decision.why,
            "model": str(decision.model.path),
            "requests": vars(requests),
        }
        if store is not None:
            result["total"] = store.stats().as_dict()
            result["layers"] = [s.as_dict() for s in store.layer_stats()]
        if keeper is not None and keeper.profile is not None:
            result["profile"] = profile_dict(keeper.file, keeper.profile)
        return result

    def _budget(self) -> dict[str, Any]:
        with self._lock:
            decision = self._decision
        return budget_dict(decision) if decision else self._no_model()
