"""Guesses of a layer's experts: what recall counts, what needs no training, and that training learns. PyTorch is optional."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFWriter

from pyspark_moe import errors
from pyspark_moe.fingerprint import model_fingerprint
from pyspark_moe.model_info import read_model_info
from pyspark_moe.pregate.recall import is_held_out, recall_at, recalls, recency_scores
from pyspark_moe.pregate.routers import read_router
from pyspark_moe.routing_trace import TraceHeader, TraceWriter
from pyspark_moe.tools.pregate import pregate

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed (pip install 'pyspark-moe[pregate]')")
N_EMBD, N_EXPERT, N_USED, N_TOKENS = 16, 64, 2, 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three routed layers: the second has a selection bias over sigmoids, the third a bias of its product."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    writer = GGUFWriter(path, "qwen3moe")
    for key, value in (("block_count", 3), ("expert_count", N_EXPERT), ("expert_used_count", N_USED), ("embedding_length", N_EMBD), ("expert_gating_func", 2)):
        writer.add_uint32(f"qwen3moe.{key}", value)
    rng = np.random.default_rng(0)
    for layer in range(3):
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", rng.standard_normal((N_EXPERT, N_EMBD)).astype(np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_up_exps.weight", np.zeros((N_EXPERT, 4, N_EMBD), np.float32))
    writer.add_tensor("blk.1.exp_probs_b.bias", 0.1 * rng.standard_normal(N_EXPERT).astype(np.float32))
    writer.add_tensor("blk.2.ffn_gate_inp.bias", rng.standard_normal(N_EXPERT).astype(np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return path


@pytest.fixture(scope="module")
def trace(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs that turn a little from layer to layer, so that a layer's router on the input before is right often."""
    info = read_model_info(model)
    rng = np.random.default_rng(1)
    turn = np.eye(N_EMBD) + 0.25 * rng.standard_normal((N_EMBD, N_EMBD))
    hidden = [rng.standard_normal((N_TOKENS, N_EMBD))]
    hidden += [hidden[0] @ turn, hidden[0] @ turn @ turn]
    path = tmp_path_factory.mktemp("trace") / "a.trace"
    header = TraceHeader((0, 1, 2), (N_EXPERT,) * 3, N_USED, N_EMBD, hidden="float16", fingerprint=model_fingerprint(info))
    with TraceWriter(path, header) as writer:
        for first in range(0, N_TOKENS, 128):
            for layer in range(3):
                inputs = hidden[layer][first : first + 128].astype(np.float16)
                selected = np.argsort(-read_router(info, layer).scores(inputs), axis=1)[:, :N_USED]
                writer.add(layer, selected, inputs)
    return path


def test_recall() -> None:
    scores = np.array([[3.0, 2, 1, 0], [0, 1, 2, 3]])
    assert recall_at(scores, np.array([[0, 1], [0, 3]]), 2) == 0.75
    assert recall_at(scores, np.array([[2, 3], [0, 1]]), 2) == 0
    assert recalls(scores, np.array([[0, 1], [0, 3]])) == {"recall@8": 1.0, "recall@16": 1.0, "recall@24": 1.0}


def test_the_temporal_guess_is_the_last_token_then_those_before() -> None:
    selected = np.array([[0, 1], [2, 3], [2, 0], [4, 5]])
    scores = recency_scores(selected, 8)
    order = np.argsort(-scores, axis=1, kind="stable")
    assert order[1, :2].tolist() == [0, 1] and order[2, :4].tolist() == [2, 3, 0, 1] and order[3, :4].tolist() == [2, 0, 3, 1]
    assert recall_at(scores[1:3], selected[1:3], 2) == 0.25  # of 2, 3 nothing is in 0, 1; of 2, 0 half is in 2, 3


def test_the_split_is_of_blocks_and_of_the_seed() -> None:
    held = is_held_out(2000, 0.25, 7)
    assert np.array_equal(held, is_held_out(2000, 0.25, 7)) and not np.array_equal(held, is_held_out(2000, 0.25, 8))
    assert held.sum() in (512, 464) and all(len(set(held[i : i + 256])) == 1 for i in range(0, 2000, 256))
    for fraction in (0.001, 0.999):
        assert 0 < is_held_out(600, fraction, 0).sum() < 600


def test_routers_are_read_as_they_select(model: Path) -> None:
    info = read_model_info(model)
    hidden = np.random.default_rng(5).standard_normal((3, N_EMBD)).astype(np.float32)
    first, second, third = (read_router(info, layer) for layer in range(3))
    assert np.allclose(first.scores(hidden), hidden @ first.weight.T)
    assert np.allclose(second.scores(hidden), 1 / (1 + np.exp(-hidden @ second.weight.T)) + second.selection_bias, atol=1e-6)
    assert second.selection_bias.any() and third.bias.any() and np.allclose(third.scores(hidden), hidden @ third.weight.T + third.bias)
    with pytest.raises(errors.ModelFileError, match="no router in block 9"):
        read_router(info, 9)


def test_the_baselines_need_no_training(model: Path, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    result = CliRunner().invoke(pregate, [str(trace), "--model", str(model), "--baselines-only", "--out", str(out), "--seed", "1", "--seed", "2"])
    assert result.exit_code == 0, result.output
    value = json.loads(out.read_text())
    assert list(value["means"]) == ["temporal", "router"] and [run["seed"] for run in value["runs"]] == [1, 2]
    assert [layer["layer"] for layer in value["runs"][0]["layers"]] == [1, 2]
    means = {method: mean["recall@8"] for method, mean in value["means"].items()}
    assert 0.3 < means["temporal"] < 0.6 < 0.7 < means["router"] < 0.95  # some experts are used more than others
    assert "temporal" in result.output and "mean" in result.output


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(pregate, [str(a) for a in arguments])
    assert isinstance(result.exception, errors.ConfigError)
    return str(result.exception)


def test_traces_that_cannot_be_used(model: Path, trace: Path, tmp_path: Path) -> None:
    experts = np.tile([0, 1], (600, 1))
    for name, changes, n in (("bare", {"hidden": ""}, 600), ("short", {}, 10), ("other", {"fingerprint": "0" * 64}, 600)):
        header = TraceHeader(**{"layers": (0, 1), "n_expert": (N_EXPERT,) * 2, "n_used": N_USED, "n_embd": N_EMBD, "hidden": "float16", **changes})
        with TraceWriter(tmp_path / name, header) as writer:
            for layer in range(2):
                writer.add(layer, experts[:n], np.zeros((n, N_EMBD)))
    assert "--hidden" in refused(tmp_path / "bare", "--model", model)
    assert "512 tokens" in refused(tmp_path / "short", "--model", model)
    assert "another model" in refused(tmp_path / "other", "--model", model)
    assert "cannot be written" in refused(trace, "--model", model, "--baselines-only", "--out", tmp_path / "no" / "a.json")
    before = model.read_bytes()
    assert "no earlier result" in refused(trace, "--model", model, "--baselines-only", "--out", model)
    assert model.read_bytes() == before


def test_training_says_that_it_needs_torch(model: Path, trace: Path) -> None:
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("PyTorch is installed")
    assert "pyspark-moe[pregate]" in refused(trace, "--model", model)


@needs_torch
@pytest.mark.parametrize("loss", ["bce", "listnet", "ranknet"])
def test_losses_prefer_the_selected(loss: str) -> None:
    import torch

    from pyspark_moe.pregate.train import LOSSES

    selected = torch.tensor([[0, 2]])
    losses = [float(LOSSES[loss](torch.tensor([scores]), selected)) for scores in ([3.0, -3, 3, -3], [0.0, 0, 0, 0], [-3.0, 3, -3, 3])]
    assert losses[0] < losses[1] < losses[2]
    if loss == "ranknet":
        assert losses[1] == pytest.approx(np.log(2))


@needs_torch
def test_training_beats_both_baselines(model: Path, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    result = CliRunner().invoke(pregate, [str(trace), "--model", str(model), "--epochs", "8", "--width", "16", "--out", str(out)])
    assert result.exit_code == 0, result.output
    means = json.loads(out.read_text())["means"]
    assert list(means) == ["temporal", "router", "bce", "listnet", "ranknet"]
    recall = {method: mean["recall@8"] for method, mean in means.items()}
    assert recall["bce"] >= recall["router"] > recall["temporal"] + 0.2, recall
    assert min(recall["listnet"], recall["ranknet"]) > recall["router"] + 0.02, recall


@needs_torch
def test_training_repeats(model: Path) -> None:
    from pyspark_moe.pregate.train import Training, train

    rng = np.random.default_rng(2)
    hidden, router = rng.standard_normal((2000, N_EMBD)).astype(np.float32), read_router(read_model_info(model), 1)
    selected = np.argsort(-router.scores(hidden @ np.roll(np.eye(N_EMBD), 1, 0)), axis=1)[:, :N_USED]
    a, b, c = (train(hidden, selected, router, "listnet", Training(epochs=3, seed=seed))(hidden) for seed in (0, 0, 1))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
