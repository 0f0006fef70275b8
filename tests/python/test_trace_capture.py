"""Traces of the demo model: what is recorded is what the router selected, and a store did what the simulator says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFReader, dequantize

from pyspark_moe import SparkConfig, errors
from pyspark_moe.config import GIB
from pyspark_moe.demo_model import path as demo_path
from pyspark_moe.model_info import read_model_info
from pyspark_moe.routing_recorder import RecordedLlama, Recorder, trace_header
from pyspark_moe.routing_trace import Trace, TraceWriter, read_trace
from pyspark_moe.simulator import Lru, Ram, simulate
from pyspark_moe.tools.trace import trace

HELDOUT = Path(__file__).resolve().parents[1] / "data" / "heldout.jsonl"
INFO = read_model_info(demo_path())


def text(number: int, n: int = 2000) -> str:
    return json.loads(HELDOUT.read_text(encoding="utf-8").splitlines()[number])["text"][:n]


def record(out: Path, texts: list[str], spark: SparkConfig | bool = False, *, step: int, hidden: bool = False, wait: bool = False) -> tuple[Trace, list]:
    """Records texts one after another; the trace, and the counters of each layer at the end."""
    with TraceWriter(out, trace_header(INFO, hidden=hidden)) as writer:
        with RecordedLlama(demo_path(), recorder=Recorder(writer), spark=spark, n_ctx=1024, n_batch=step, n_ubatch=step, n_threads=2, verbose=False) as llm:
            for part in texts:
                llm.read(llm.tokenize(part.encode())[:1024])
                if wait:
                    assert llm.spark.wait_idle(20)
            stats = list(llm.spark.layer_stats())
            plan = llm.spark.decision.plan if llm.spark.decision else None
    read = read_trace(out)
    return read, [plan, stats]


def test_the_recorded_inputs_and_the_routers_select_what_was_recorded(tmp_path: Path) -> None:
    read, _ = record(tmp_path / "a.trace", [text(0), text(30)], step=64, hidden=True)
    assert read.header.layers == tuple(range(1, 8)) and (read.routing.experts >= 0).all()
    tensors = {t.name: t for t in GGUFReader(demo_path()).tensors}
    for index, layer in enumerate(read.header.layers):
        router = tensors[f"blk.{layer}.ffn_gate_inp.weight"]
        weight = dequantize(router.data, router.tensor_type).reshape(read.header.n_expert[index], read.header.n_embd)
        logits = read.hidden(index).astype(np.float32) @ weight.T
        scores = 1 / (1 + np.exp(-logits)) + tensors[f"blk.{layer}.exp_probs_b.bias"].data
        selected = np.sort(np.argsort(-scores, axis=1)[:, : read.header.n_used], axis=1)
        same = (selected == np.sort(read.routing.experts[:, index], axis=1)).mean()
        assert same > 0.99, f"block {layer}"  # inputs are kept in half precision


def test_steps_and_residency_do_not_change_what_is_selected(tmp_path: Path) -> None:
    whole, _ = record(tmp_path / "a.trace", [text(0)], step=128)
    alone, _ = record(tmp_path / "b.trace", [text(0)], SparkConfig(slots=6, profile="none"), step=1)
    assert whole.routing.n_tokens == alone.routing.n_tokens > 256
    assert len(alone.routing.steps) == alone.routing.n_tokens + 1 and whole.routing.steps.tolist()[:3] == [0, 128, 256]
    assert (whole.routing.counts() > 0).sum() > 7 * 16
    same = np.sort(whole.routing.experts, axis=2) == np.sort(alone.routing.experts, axis=2)
    assert same.mean() > 0.97  # rounding depends on the batch, and near ties with it
    assert np.array_equal(whole.routing.in_steps_of(1).steps, alone.routing.steps)


@pytest.mark.parametrize("config", [{"slots": 12}, {"slots": 5}, {"ram_gib": INFO.expert_bytes * 0.6 / GIB}])
def test_the_simulator_hits_what_a_store_hits(tmp_path: Path, config: dict[str, float]) -> None:
    read, (plan, stats) = record(tmp_path / "a.trace", [text(0, 1200), text(20, 800)], SparkConfig(profile="none", **config), step=1)
    simulated = simulate(read.routing, plan, Ram())
    assert simulated.hits.sum(axis=0).tolist() == [s.hits for s in stats]
    assert simulated.uses.sum(axis=0).tolist() == [s.uses for s in stats]
    assert simulated.bytes_read.sum() == sum(s.misses for s in stats)
    assert 0.3 < simulated.hit_rate < 0.999
    for other in (Lru(), Ram(half_life=64), Ram(admit_margin=1.25)):  # hits that any policy has would prove nothing
        assert simulate(read.routing, plan, other).hits.sum(axis=0).tolist() != [s.hits for s in stats]


def test_the_simulator_hits_what_a_store_hits_with_prompts(tmp_path: Path) -> None:
    """A prompt that needs more experts than there are slots: one micro-batch each, then the store's thread settles."""
    read, (plan, stats) = record(tmp_path / "a.trace", [text(n, 700) for n in (0, 20, 40, 5, 25)], SparkConfig(slots=12, profile="none"), step=512, wait=True)
    assert len(read.routing.steps) - 1 == 5
    simulated = simulate(read.routing, plan, Ram())
    assert simulated.hits.sum(axis=0).tolist() == [s.hits for s in stats]
    assert simulated.moves == sum(s.promotions for s in stats)


def test_the_tool_writes_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "demo.trace"
    result = CliRunner().invoke(trace, [str(demo_path()), "--corpus", str(HELDOUT), "--out", str(out), "--max-tokens", "300", "--step", "100"])
    assert result.exit_code == 0, result.output
    read = read_trace(out)
    assert read.routing.n_tokens == 300 and len(read.header.fingerprint) == 64 and "300 tokens" in result.output
    assert read.header.strides == tuple(layer.strides for layer in INFO.layers)
    before = out.read_bytes()
    again = CliRunner().invoke(trace, [str(demo_path()), "--corpus", str(HELDOUT), "--out", str(out), "--max-tokens", "100"])
    assert isinstance(again.exception, errors.ConfigError) and "--force" in str(again.exception) and out.read_bytes() == before


def test_the_size_cap_ends_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "demo.trace"
    arguments = [str(demo_path()), "--corpus", str(HELDOUT), "--out", str(out), "--hidden", "--max-gib", "0.001", "--step", "64"]
    result = CliRunner().invoke(trace, arguments)
    assert result.exit_code == 0 and "--max-gib ended it" in result.output
    assert out.stat().st_size <= 0.001 * GIB and read_trace(out).is_capped and read_trace(out).routing.n_tokens > 64


@pytest.mark.parametrize("line, error", [(b'{"text": 3}\n', "no text"), (b'{"other": ""}\n', "neither"), (b"\xff\n", "neither"), (b"[1]\n", "neither")])
def test_the_tool_refuses_what_is_no_corpus(tmp_path: Path, line: bytes, error: str) -> None:
    (tmp_path / "c.jsonl").write_bytes(line)
    result = CliRunner().invoke(trace, [str(demo_path()), "--corpus", str(tmp_path / "c.jsonl"), "--out", str(tmp_path / "o")])
    assert isinstance(result.exception, errors.TraceError) and error in str(result.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_the_tool_needs_something_to_read(tmp_path: Path) -> None:
    result = CliRunner().invoke(trace, [str(demo_path()), "--out", str(tmp_path / "o")])
    assert isinstance(result.exception, errors.ConfigError) and "--corpus or --text" in str(result.exception)


def test_what_the_guide_shows_works() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "traces.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stderr
    rates = [float(rate) for rate in re.findall(r": ([\d.]+)% of the expert uses", done.stdout)]
    assert len(rates) == 3 and max(rates) == rates[2] < 100
