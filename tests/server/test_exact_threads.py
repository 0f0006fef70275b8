"""Several models, stores and contexts at work in one process, and their life cycle in every order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark_moe import errors
from pyspark_moe.store import Store
from runner import Context, Model, Trace, llama, plan_for, run_chunks, run_greedy, run_parallel
from synthetic import ModelFolder, models  # noqa: F401


def scenario(context: Context, seed: int) -> Trace:
    trace = Trace()
    run_greedy(context, 10, trace, run_chunks(context, [3, 70, 20], trace, seed=seed))
    llama.llama_memory_clear(context.memory, True)
    run_parallel(context, 2, 6, trace)
    return trace


def alone(path: Path, seed: int) -> Trace:
    """The all-resident run with nothing else going on."""
    with Store(path) as store, Model(path, store) as model, model.context(n_seq_max=2) as context:
        return scenario(context, seed)


def run_together(jobs: list[Callable[[], Trace]], repeat: int) -> list[list[Trace]]:
    """All jobs at once, `repeat` times each; they start together."""
    start = threading.Barrier(len(jobs))

    def work(job: Callable[[], Trace]) -> list[Trace]:
        start.wait()
        return [job() for _ in range(repeat)]

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [done.result() for done in [pool.submit(work, job) for job in jobs]]


@pytest.mark.parametrize("policy", ["frequency", "chaos"])
@pytest.mark.parametrize("preset", ["demo", "qwen35moe-fused"])
def test_contexts_share_a_store(preset: str, policy: str, models: ModelFolder) -> None:
    """Three contexts of one model compete for the same few slots."""
    path = models.get(preset)
    expected = [alone(path, seed) for seed in range(3)]
    with Store(path) as store:
        store.set_plan(plan_for(store, 0.25, policy, initial="none", seed=1))
        with Model(path, store) as model:
            contexts = [model.context(n_seq_max=2) for _ in range(3)]

            def job(index: int) -> Trace:
                llama.llama_memory_clear(contexts[index].memory, True)
                return scenario(contexts[index], index)

            for index, traces in enumerate(run_together([lambda i=i: job(i) for i in range(3)], repeat=2)):
                for trace in traces:
                    expected[index].assert_same(trace)
            for context in contexts:
                context.close()
            stats = store.stats()
            assert stats.misses > 0 and stats.evictions > 0 and stats.uses == stats.hits + stats.misses


def test_models_side_by_side(models: ModelFolder) -> None:
    """Two architectures, and the same file in two stores, load, run and go at their own pace."""
    paths = [models.get("demo"), models.get("gpt-oss"), models.get("demo")]
    expected = [alone(path, seed) for seed, path in enumerate(paths)]

    def job(index: int) -> Trace:
        with Store(paths[index]) as store:
            store.set_plan(plan_for(store, 0.3, "chaos", seed=index))
            with Model(paths[index], store) as model, model.context(n_seq_max=2) as context:
                return scenario(context, index)

    for index, traces in enumerate(run_together([lambda i=i: job(i) for i in range(3)], repeat=2)):
        for trace in traces:
            expected[index].assert_same(trace)


def test_counters_are_read_while_it_runs(models: ModelFolder) -> None:
    """Statistics and residency from another thread are consistent, and disturb nothing."""
    path = models.get("qwen3moe")
    expected = alone(path, 0)
    with Store(path) as store:
        store.set_plan(plan_for(store, 0.4, "chaos", seed=2))
        with Model(path, store) as model, model.context(n_seq_max=2) as context:
            done = threading.Event()
            seen: list[str] = []

            def watch() -> None:
                while not done.is_set():
                    for i, stats in enumerate(store.layer_stats()):
                        slots = store.residency(i)
                        used = slots[slots >= 0]
                        if stats.uses != stats.hits + stats.misses:
                            seen.append(f"layer {i}: {stats.uses} uses, {stats.hits} hits, {stats.misses} misses")
                        if len(set(used.tolist())) != len(used) or (used >= stats.n_fast).any():
                            seen.append(f"layer {i}: slots {slots.tolist()}")

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                trace = scenario(context, 0)
            finally:
                done.set()
                watcher.join()
            assert not seen
            expected.assert_same(trace)
            counts = [int(store.counts(i).sum()) for i in range(len(store.layers))]
            assert counts == [stats.uses for stats in store.layer_stats()]


@pytest.mark.parametrize("order", ["store first", "model first"])
def test_freed_in_any_order(order: str, models: ModelFolder) -> None:
    path = models.get("qwen3moe")
    expected = alone(path, 4)
    store = Store(path)
    store.set_plan(plan_for(store, 0.3, seed=1))
    model = Model(path, store)
    context = model.context(n_seq_max=2)
    if order == "store first":
        store.close()
        expected.assert_same(scenario(context, 4))
        context.close()
        model.close()
    else:
        context.close()
        model.close()
        assert not store.is_loaded
        store.close()
    store.close()


def test_a_store_serves_a_model_again(models: ModelFolder) -> None:
    """Loaded, freed and loaded again with another plan."""
    path = models.get("laguna")
    expected = alone(path, 1)
    with Store(path) as store:
        for fraction in (0.3, 1.0, 0.0):
            store.set_plan(plan_for(store, fraction))
            with Model(path, store) as model:
                assert store.is_loaded
                with pytest.raises(errors.SparkError, match="loaded"):
                    store.set_plan(plan_for(store, 0.5))
                with model.context(n_seq_max=2) as context:
                    expected.assert_same(scenario(context, 1))
            assert not store.is_loaded


def test_one_store_one_model(models: ModelFolder) -> None:
    """A second model through the same store, or another file's model, is refused, and the first goes on."""
    path, other = models.get("qwen3moe"), models.get("qwen3moe-scales")
    with Store(path) as store:
        store.set_plan(plan_for(store, 0.5))
        with Model(path, store) as model, model.context(n_seq_max=2) as context:
            with pytest.raises(RuntimeError, match="could not load"):
                Model(path, store)
            with pytest.raises(RuntimeError, match="could not load"):
                Model(other, store)
            alone(path, 2).assert_same(scenario(context, 2))
    with Store(path) as store:
        with pytest.raises(RuntimeError, match="could not load"):
            Model(other, store)
        assert not store.is_loaded
