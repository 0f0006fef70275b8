"""Residency changes speed and nothing else: every logit equals, bit by bit, that of the all-resident run.

The reference is the same build with every expert fast, and that in turn equals llama.cpp without a store when it does
not repack weights. Each run decodes the same chunks; see runner.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from exactness import Scenario, assert_adapter_matters, damage, each_alone, mix, references, run_adapter, shifted  # noqa: F401
from pyspark_moe.store import Stats, Store
from runner import Context, Model, Trace, llama, plan_for
from synthetic import TINY, ModelFolder, models  # noqa: F401

MODELS = ("demo", *TINY)
FRACTIONS = (0.0, 0.1, 0.3, 0.6, 1.0)
SIZES = (1, 2, 3, 7, 17, 64, 200)


def mixed(context: Context) -> Trace:
    """Prompt chunks of many sizes, then single tokens, then four sequences side by side."""
    return mix(context, SIZES, 16, 4, 8)


def run_plain(path: Path, scenario: Scenario = mixed, **settings: object) -> Trace:
    """llama.cpp alone, without a store."""
    with Model(path) as model, model.context(n_seq_max=4, **settings) as context:
        return scenario(context)


def run_stored(path: Path, fraction: float, policy: str = "frequency", scenario: Scenario = mixed, *,
               initial: str = "first", pinned: float = 0.0, load_mode: int | None = None, direct_io: bool = True,
               settings: dict[str, object] | None = None) -> tuple[Trace, Stats]:
    """The scenario with `fraction` of the experts fast, and the counters at its end."""
    with Store(path, direct_io=direct_io) as store:
        store.set_plan(plan_for(store, fraction, policy, initial=initial, pinned=pinned, seed=7))
        with Model(path, store, load_mode=load_mode) as model:
            with model.context(n_seq_max=4, **(settings or {})) as context:
                trace = scenario(context)
            return trace, store.stats()


def reference(cache: dict[object, Trace], path: Path, scenario: Scenario = mixed) -> Trace:
    key = (path, scenario)
    if key not in cache:
        trace, stats = run_stored(path, 1.0, scenario=scenario)
        assert stats.misses == 0 and stats.hits == stats.uses > 0
        cache[key] = trace
    return cache[key]


@pytest.mark.parametrize("preset", MODELS)
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
    if fraction < 1.0:
        assert stats.misses > 0, "nothing was missed, so nothing was tested"
    if fraction == 0.0:
        assert stats.hits == 0 and stats.fast_bytes == 0
    if policy == "static":
        assert stats.evictions == 0
    if policy == "frequency" and 0.3 <= fraction < 1.0 and preset != "llama4":
        assert stats.evictions > 0 and stats.bytes_read > 0
    if policy == "chaos" and fraction >= 0.3:
        assert stats.evictions > 0


@pytest.mark.parametrize("initial", ["first", "last", "none"])
@pytest.mark.parametrize("pinned", [0.0, 0.5, 1.0])
def test_ring_sizes(initial: str, pinned: float, models: ModelFolder, references: dict[object, Trace]) -> None:
    """Which experts start in fast slots, and how many never leave them."""
    path = models.get("demo")
    trace, _ = run_stored(path, 0.4, "chaos", initial=initial, pinned=pinned)
    reference(references, path).assert_same(trace)


def test_pinned_experts_stay(models: ModelFolder) -> None:
    path = models.get("demo")
    with Store(path) as store:
        store.set_plan(plan_for(store, 0.4, "chaos", pinned=0.5, seed=3))
        with Model(path, store) as model, model.context(n_seq_max=4) as context:
            pinned = [store.residency(i)[:6].copy() for i in range(len(store.layers))]
            mixed(context)
            assert store.stats().evictions > 0
            for i in range(len(store.layers)):
                assert (store.residency(i)[:6] == pinned[i]).all() and (pinned[i] >= 0).all()


BATCHES = (1, 2, 3, 4, 5, 8, 9, 16, 31, 32, 33, 128, 511, 512, 513, 1024, 2048)


@pytest.mark.parametrize("n_ubatch", [512, 2048])
@pytest.mark.parametrize("preset", ["demo", "qwen35moe-fused", "gpt-oss"])
def test_batch_shapes(preset: str, n_ubatch: int, models: ModelFolder) -> None:
    scenario, path = each_alone(BATCHES), models.get(preset)
    settings: dict[str, object] = {"n_ubatch": n_ubatch}
    all_fast, _ = run_stored(path, 1.0, scenario=scenario, settings=settings)
    some_fast, stats = run_stored(path, 0.3, "chaos", scenario, settings=settings)
    all_fast.assert_same(some_fast)
    assert stats.misses_home > 0, "no batch touched more experts than there are slots"


@pytest.mark.parametrize("preset", ["demo", "qwen3moe", "gpt-oss"])
def test_context_shift(preset: str, models: ModelFolder) -> None:
    path = models.get(preset)
    all_fast, _ = run_stored(path, 1.0, scenario=shifted)
    trace, stats = run_stored(path, 0.3, "chaos", shifted)
    all_fast.assert_same(trace)
    assert stats.misses > 0


@pytest.mark.parametrize("preset", ["qwen3moe", "qwen3moe-scales", "qwen35moe-fused", "gpt-oss", "laguna"])
def test_lora_on_experts(preset: str, models: ModelFolder) -> None:
    path, adapter_path = models.get(preset), models.adapter(preset)
    plain = run_adapter(path, adapter_path, None)
    assert_adapter_matters(plain)
    for fraction, policy in ((1.0, "frequency"), (0.3, "frequency"), (0.3, "chaos"), (0.0, "static")):
        with Store(path) as store:
            store.set_plan(plan_for(store, fraction, policy, seed=5))
            plain.assert_same(run_adapter(path, adapter_path, store))


@pytest.mark.parametrize("preset", ["qwen3moe", "qwen35moe-fused", "laguna"])
@pytest.mark.parametrize("split_tensors", [1, 7])
def test_split_file(preset: str, split_tensors: int, models: ModelFolder, references: dict[object, Trace]) -> None:
    """Layers that straddle shards: with one tensor in a shard, every layer does."""
    shards = models.get(preset, split_tensors=split_tensors)
    whole = reference(references, models.get(preset))
    for fraction in (1.0, 0.3):
        trace, _ = run_stored(shards, fraction, "chaos")
        whole.assert_same(trace)


@pytest.mark.parametrize("load_mode", [llama.LLAMA_LOAD_MODE_NONE, llama.LLAMA_LOAD_MODE_MMAP, llama.LLAMA_LOAD_MODE_DIRECT_IO])
@pytest.mark.parametrize("direct_io", [True, False])
def test_load_modes(load_mode: int, direct_io: bool, models: ModelFolder, references: dict[object, Trace]) -> None:
    """However the other weights are loaded and the experts read."""
    path = models.get("qwen3moe")
    trace, _ = run_stored(path, 0.4, load_mode=load_mode, direct_io=direct_io)
    reference(references, path).assert_same(trace)


def test_a_wrong_expert_is_noticed(models: ModelFolder, tmp_path: Path, references: dict[object, Trace]) -> None:
    """The negative control: one damaged expert of one layer changes the trace, so equal traces mean something."""
    path = models.get("qwen3moe")
    damaged = damage(path, tmp_path / "damaged.gguf", 16, [_hottest(path)])
    trace, _ = run_stored(damaged, 0.3)
    with pytest.raises(AssertionError, match="rows differ"):
        reference(references, path).assert_same(trace)


def _hottest(path: Path) -> int:
    """The most used expert of the second layer."""
    with Store(path) as store:
        store.set_plan(plan_for(store, 0.5))
        with Model(path, store) as model, model.context(n_seq_max=4) as context:
            mixed(context)
        return int(store.counts(1).argmax())
