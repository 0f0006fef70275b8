"""What the tests of exactness share, on the CPU and on a GPU: scenarios that are run twice and compared, and damage to notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import gguf
import pytest
from pyspark_moe.store import Store
from runner import Context, Model, Trace, llama, run_chunks, run_greedy, run_parallel

Scenario = Callable[[Context], Trace]


def mix(context: Context, sizes: Sequence[int], n_greedy: int, n_seq: int, n_parallel: int) -> Trace:
    """Prompt chunks of these sizes, n_greedy single tokens, then n_seq sequences side by side for n_parallel steps."""
    trace = Trace()
    position = run_chunks(context, sizes, trace)
    run_greedy(context, n_greedy, trace, position)
    llama.llama_memory_clear(context.memory, True)
    run_parallel(context, n_seq, n_parallel, trace)
    assert trace.is_sane()
    return trace


def each_alone(sizes: Sequence[int]) -> Scenario:
    """One prompt of each size, from an empty context each time."""

    def scenario(context: Context) -> Trace:
        trace = Trace()
        for size in sizes:
            llama.llama_memory_clear(context.memory, True)
            run_chunks(context, [size], trace, seed=size)
        assert trace.is_sane()
        return trace

    return scenario


def shifted(context: Context) -> Trace:
    """A context shift in the middle of a text."""
    assert context.can_shift
    trace = Trace()
    position = run_chunks(context, [200, 40], trace)
    position = run_greedy(context, 6, trace, position)
    context.shift(20, 120, 100)
    run_greedy(context, 12, trace, position - 100)
    return trace


def run_adapter(path: Path, adapter_path: Path, store: Store | None, *, gpu: bool = False) -> Trace:
    """The same text without a LoRA adapter, with it, and with a quarter of it."""
    with Model(path, store, gpu=gpu) as model:
        adapter = model.adapter(adapter_path)
        with model.context(n_seq_max=4) as context:
            trace = Trace()
            for scale in (0.0, 1.0, 0.25):  # 0: without the adapter
                llama.llama_memory_clear(context.memory, True)
                context.set_adapter(adapter if scale else None, scale)
                run_greedy(context, 8, trace, run_chunks(context, [5, 100], trace, seed=1))
            return trace


def assert_adapter_matters(trace: Trace) -> None:
    """For traces of run_adapter."""
    steps = len(trace.logits) // 3
    assert not (trace.logits[0] == trace.logits[steps]).all(), "the adapter changes nothing, so nothing is tested"


def damage(path: Path, copy: Path, n_expert: int, experts: Iterable[int]) -> Path:
    """A copy of a model in which a byte of these experts' down matrices in block 1 is wrong."""
    copy.write_bytes(path.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down_exps.weight")
    with copy.open("r+b") as file:
        for expert in experts:
            file.seek(int(tensor.data_offset) + expert * tensor.n_bytes // n_expert + 40)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0xFF]))
    return copy


@pytest.fixture(scope="session")
def references() -> dict[object, Trace]:
    """All-resident traces by model and scenario, made at first use."""
    return {}
