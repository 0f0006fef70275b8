"""Residency on a GPU changes speed and nothing else: every logit equals, bit by bit, that of the all-resident run."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from exactness import Scenario, assert_adapter_matters, damage, each_alone, mix, references, run_adapter, shifted  # noqa: F401
from pyspark_moe.store import Stats, Store
from runner import Context, Model, Trace, llama, plan_for, run_chunks, run_greedy
from synthetic import TINY, ModelFolder, models  # noqa: F401

pytestmark = pytest.mark.cuda

MODELS = ("demo", *TINY)
FRACTIONS = (0.0, 0.01, 0.1, 0.3, 0.6, 1.0)
SIZES = (1, 2, 3, 7, 8, 9, 17, 64, 200)
BATCHES = (*range(1, 17), 31, 32, 33, 128, 511, 512, 513, 1024, 2048)


def mixed(context: Context) -> Trace:
    """Prompt chunks of many sizes, then single tokens, then eight sequences side by side."""
    return mix(context, SIZES, 32, 8, 16)


batches = each_alone(BATCHES)


def run_plain(path: Path, scenario: Scenario = mixed, **settings: object) -> Trace:
    """llama.cpp alone, everything on the GPU."""
    with Model(path, gpu=True) as model, model.context(n_seq_max=8, **settings) as context:
        return scenario(context)


def run_stored(path: Path, fraction: float, policy: str = "frequency", scenario: Scenario = mixed, *,
               initial: str = "first", place: bool = False, staging_bytes: int = -1, **settings: object) -> tuple[Trace, Stats]:
    """The scenario with `fraction` of the experts fast, and the counters at its end. place: slots after loading."""
    with Store(path, device="CUDA0") as store:
        plan = plan_for(store, fraction, policy, initial=initial, seed=7)
        store.set_plan(plan_for(store, 0.0, policy) if place else plan)
        with Model(path, store, gpu=True) as model:
            with model.context(n_seq_max=8, **settings) as context:
                if place:
                    run_chunks(context, [40, 1], Trace())
                    llama.llama_memory_clear(context.memory, True)
                    store.place(replace(plan, staging_bytes=staging_bytes))
                    store.reset_stats()
                trace = scenario(context)
            return trace, store.stats()


def reference(cache: dict[object, Trace], path: Path, scenario: Scenario = mixed, **settings: object) -> Trace:
    key = (path, scenario, *settings.items())
    if key not in cache:
        cache[key], stats = run_stored(path, 1.0, scenario=scenario, **settings)
        assert stats.misses == 0
    return cache[key]


@pytest.mark.parametrize("preset", [p for p in MODELS if p != "llama4"])  # F16 experts: ggml's choice to fuse depends on its allocator
def test_all_resident_equals_llama_cpp(preset: str, models: ModelFolder, references: dict[object, Trace]) -> None:
    path = models.get(preset)
    reference(references, path).assert_same(run_plain(path))


@pytest.mark.parametrize("policy", ["frequency", "static", "chaos"])
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("preset", MODELS)
def test_residency(preset: str, fraction: float, policy: str, models: ModelFolder, references: dict[object, Trace]) -> None:
    path = models.get(preset)
    trace, stats = run_stored(path, fraction, policy)
    reference(references, path).assert_same(trace)
    assert stats.uses == stats.hits + stats.misses
    if fraction < 0.1:
        assert stats.misses > 0, "nothing was missed, so nothing was tested"
    if policy == "static":
        assert stats.evictions == 0
    if policy == "chaos" and 0.3 <= fraction < 1.0:
        assert stats.evictions > 0


@pytest.mark.parametrize("initial", ["last", "none"])
@pytest.mark.parametrize("fraction", [0.1, 0.6, 1.0])
@pytest.mark.parametrize("preset", ["demo", "qwen35moe-fused", "gpt-oss"])
def test_slots_placed_after_loading(preset: str, fraction: float, initial: str, models: ModelFolder, references: dict[object, Trace]) -> None:
    path = models.get(preset)
    trace, stats = run_stored(path, fraction, initial=initial, place=True)
    reference(references, path).assert_same(trace)
    assert stats.n_fast == sum(round(fraction * n) for n in _experts(path))


def _experts(path: Path) -> list[int]:
    with Store(path) as store:
        return [info.n_expert for info in store.layers]


@pytest.mark.parametrize("n_ubatch", [512, 2048])
@pytest.mark.parametrize("staging_bytes", [0, 32 << 20, 1 << 30])
@pytest.mark.parametrize("preset", ["demo", "qwen35moe-fused", "gpt-oss", "laguna"])
def test_batch_sizes(preset: str, staging_bytes: int, n_ubatch: int, models: ModelFolder, references: dict[object, Trace]) -> None:
    """Every batch from 1 to 16 and large ones, with experts read from home, staged in part, and all staged."""
    path = models.get(preset)
    trace, _ = run_stored(path, 0.3, "chaos", batches, place=True, staging_bytes=staging_bytes, n_ubatch=n_ubatch)
    reference(references, path, batches, n_ubatch=n_ubatch).assert_same(trace)


@pytest.mark.parametrize("preset", ["qwen3moe", "qwen35moe-fused", "gpt-oss", "laguna"])
def test_lora_on_experts(preset: str, models: ModelFolder) -> None:
    path, adapter_path = models.get(preset), models.adapter(preset)

    def run(fraction: float, policy: str) -> Trace:
        with Store(path, device="CUDA0") as store:
            store.set_plan(plan_for(store, fraction, policy, seed=5))
            return run_adapter(path, adapter_path, store, gpu=True)

    plain = run(1.0, "static")
    assert_adapter_matters(plain)
    for fraction, policy in ((0.3, "frequency"), (0.3, "chaos"), (0.0, "static")):
        plain.assert_same(run(fraction, policy))


def test_two_contexts_at_once(models: ModelFolder) -> None:
    """Two threads, two contexts of one model, experts moving all the time: slots are not filled under either."""
    path = models.get("demo")

    def scenario(seed: int) -> Scenario:
        def run(context: Context) -> Trace:
            trace = Trace()
            run_greedy(context, 200, trace, run_chunks(context, [30, 600], trace, seed=seed))
            return trace

        return run

    expected = [run_stored(path, 1.0, scenario=scenario(s))[0] for s in (1, 2)]
    with Store(path, device="CUDA0") as store:
        store.set_plan(plan_for(store, 0.3, "chaos", seed=9))
        with Model(path, store, gpu=True) as model, model.context(n_seq_max=8) as a, model.context(n_seq_max=8) as b:
            found: list[Trace | None] = [None, None]

            def work(i: int, context: Context) -> None:
                found[i] = scenario(i + 1)(context)

            threads = [threading.Thread(target=work, args=(i, c)) for i, c in enumerate((a, b))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for i in (0, 1):
            trace = found[i]
            assert trace is not None
            expected[i].assert_same(trace)
        assert store.stats().evictions > 50


def test_context_shift(models: ModelFolder) -> None:
    path = models.get("demo")
    all_fast, _ = run_stored(path, 1.0, scenario=shifted)
    trace, _ = run_stored(path, 0.3, "chaos", shifted)
    all_fast.assert_same(trace)


def test_a_wrong_expert_is_noticed(models: ModelFolder, tmp_path: Path, references: dict[object, Trace]) -> None:
    """The negative control: one damaged expert changes the trace, so equal traces mean something."""
    path = models.get("qwen3moe")
    damaged = damage(path, tmp_path / "damaged.gguf", 16, range(16))
    trace, _ = run_stored(damaged, 0.3)
    with pytest.raises(AssertionError, match="rows differ"):
        reference(references, path).assert_same(trace)
