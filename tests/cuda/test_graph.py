"""A decode step of a resident or partly resident model is one recorded CUDA graph, and nothing in it waits for the host."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark_moe.store import Store
from runner import Model, Trace, llama, plan_for, run_chunks, run_greedy
from synthetic import ModelFolder, models  # noqa: F401

pytestmark = pytest.mark.cuda


class Log:
    """What llama.cpp and ggml log meanwhile."""

    def __enter__(self) -> Log:
        self.text = ""
        self._callback = llama.llama_log_callback(self._line)
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))
        return self

    def _line(self, level: int, text: bytes, data: object) -> None:
        self.text += text.decode(errors="replace")

    def __exit__(self, *exception: object) -> None:
        llama.llama_log_set(llama.llama_log_callback(0), ctypes.c_void_p(0))

    @property
    def n_splits(self) -> int:
        """Parts that the scheduler cuts the graph into: one for each change of device."""
        found = re.findall(r"graph: nodes = \d+, splits = (\d+)", self.text)
        assert found, self.text[-2000:]
        return int(found[-1])


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("preset", ["demo", "qwen3moe", "qwen35moe-fused", "gpt-oss", "laguna", "deepseek2-groups"])
def test_no_more_splits_than_llama_cpp(preset: str, fraction: float, models: ModelFolder) -> None:
    path = models.get(preset)
    with Log() as plain, Model(path, gpu=True) as model, model.context():
        pass
    with Store(path, device="CUDA0") as store:
        store.set_plan(plan_for(store, fraction))
        with Log() as ours, Model(path, store, gpu=True) as model, model.context():
            pass
    assert ours.n_splits == plain.n_splits


@pytest.mark.parametrize("n_seq", [1, 4])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("preset", ["demo", "qwen3moe", "laguna"])
def test_decode_steps_replay_one_graph(preset: str, fraction: float, n_seq: int, models: ModelFolder) -> None:
    """ggml records a graph at its first runs and replays it afterwards; our nodes are enqueued when it is recorded only."""
    with Store(models.get(preset), device="CUDA0") as store:
        store.set_plan(plan_for(store, fraction))
        with Model(store.path, store, gpu=True) as model, model.context(n_seq_max=n_seq) as context:
            run_steps(context, n_seq, 10)
            before = store.stats()
            run_steps(context, n_seq, 64)
            after = store.stats()
    steps, replayed = after.steps - before.steps, after.steps_replayed - before.steps_replayed
    assert steps >= 64
    assert replayed >= 0.9 * steps, f"{replayed} of {steps} steps were replayed"


def run_steps(context: object, n_seq: int, n: int) -> None:
    """n decode steps of n_seq sequences."""
    llama.llama_memory_clear(context.memory, True)
    for step in range(n):
        context.decode([300 + 7 * s + step for s in range(n_seq)], [step] * n_seq, list(range(n_seq)))


def test_the_model_and_its_pinned_copy_are_given_back(models: ModelFolder) -> None:
    from pyspark_moe._native import device_memory

    path = models.get("demo")

    def load() -> None:
        with Store(path, device="CUDA0") as store:
            store.set_plan(plan_for(store, 0.5))
            with Model(path, store, gpu=True) as model, model.context() as context:
                run_greedy(context, 4, trace := Trace(), run_chunks(context, [600], trace))

    load()
    _, free = device_memory("CUDA0")
    for _ in range(3):
        load()
    assert device_memory("CUDA0")[1] >= free - (2 << 20)


def test_two_stores_two_models(models: ModelFolder) -> None:
    """Each model has its own store, slots and thread; a store serves its own file alone."""
    paths = [models.get("demo"), models.get("qwen3moe")]
    traces = []
    for together in (False, True):
        results: list[Trace] = []
        if together:
            with Store(paths[0], device="CUDA0") as a, Store(paths[1], device="CUDA0") as b:
                a.set_plan(plan_for(a, 0.4, "chaos"))
                b.set_plan(plan_for(b, 0.4, "chaos"))
                with Model(paths[0], a, gpu=True) as x, Model(paths[1], b, gpu=True) as y, x.context() as c, y.context() as d:
                    for context in (c, d):
                        trace = Trace()
                        run_greedy(context, 20, trace, run_chunks(context, [50], trace))
                        results.append(trace)
        else:
            for path in paths:
                results.append(alone(path))
        traces.append(results)
    for one, other in zip(*traces):
        one.assert_same(other)


def alone(path: Path) -> Trace:
    with Store(path, device="CUDA0") as store:
        store.set_plan(plan_for(store, 1.0))
        with Model(path, store, gpu=True) as model, model.context() as context:
            trace = Trace()
            run_greedy(context, 20, trace, run_chunks(context, [50], trace))
            return trace


def test_slots_are_placed_again_and_again(models: ModelFolder) -> None:
    """Plans change under a running swap engine; what steps read before, between and after is the same."""
    path = models.get("demo")
    expected = alone(path)
    with Store(path, device="CUDA0") as store:
        store.set_plan(plan_for(store, 0.0, "chaos"))
        with Model(path, store, gpu=True) as model, model.context() as context:
            for round_number in range(12):
                plan = plan_for(store, (0.3, 0.0, 0.9, 0.5)[round_number % 4], "chaos", seed=round_number)
                store.place(replace(plan, staging_bytes=(0, 64 << 20, 1 << 30)[round_number % 3]))
                llama.llama_memory_clear(context.memory, True)
                trace = Trace()
                run_greedy(context, 20, trace, run_chunks(context, [50], trace))
                expected.assert_same(trace)
