"""The synthetic models in the true size of published ones: their sizes without writing them, and how they are written and
routed, on smaller ones of the same kind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import click.testing
import gguf
import numpy as np
import pytest
from gguf import quants
from synthetic import DEMO, PRESETS, Shape  # first: it puts scripts/ on the path

import make_synthetic_moe  # isort: skip
from synthetic_moe import data
from synthetic_moe.data import is_tiled, make_tile, pieces, tiled_pieces
from synthetic_moe.k_quants import quantize_q6_k
from synthetic_moe.routing import RouterSample, Topics, embeddings, output_head, previous_tokens, skew_for_share, topic_prompt
from synthetic_moe.shape import FULL_SIZE
from synthetic_moe.tensors import TensorSpec
from synthetic_moe.writer import model_prompt, tensor_specs, write_model

# Weights in all, and GiB of the file. Published figures: llama-bench on gpt-oss-20b prints 20.91 B and 11.27 GiB; the
# model cards say 33.4 B and 35 B (34.7 B without vision), and Q4_K_M is 4.8 to 4.9 bits a weight.
PUBLISHED = {"laguna-xs2": (33.4e9, 18.8), "qwen36-35b-a3b": (34.7e9, 19.7), "gpt-oss-20b": (20.91e9, 11.27)}

# Experts of more than one piece of the small tiles below, and a padded vocabulary
WIDE = Shape("laguna", n_layer=2, n_embd=256, n_expert=9, n_used=2, n_ff_exp=2048, n_ff=256, n_vocab=11000,
             expert_type="Q4_K", down_type="Q6_K", down_rest_type="Q4_K", vocab_type="Q6_K", skew=1.0)  # fmt: skip


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 MiB, so that a model of 10 MiB is written as one of 20 GiB is."""
    monkeypatch.setattr(data, "TILE_BYTES", 8 << 20)
    monkeypatch.setattr(data, "PIECE_BYTES", 256 << 10)


@pytest.mark.parametrize("preset", FULL_SIZE)
def test_sizes_are_those_that_were_published(preset: str) -> None:
    n_weights, gib = PUBLISHED[preset]
    specs, _ = tensor_specs(PRESETS[preset].with_changes(skew=1.0), 0)
    assert sum(spec.n_rows * spec.ne[0] for spec in specs) == pytest.approx(n_weights, rel=0.01)
    assert sum(spec.n_bytes for spec in specs) / 2**30 == pytest.approx(gib, rel=0.02)


def test_q4_k_m_stores_half_of_the_downs_high() -> None:
    specs, _ = tensor_specs(PRESETS["laguna-xs2"].with_changes(skew=1.0), 0)
    kinds = [spec.kind.name for spec in specs if "ffn_down_exps" in spec.name]
    assert kinds[:8] == ["Q6_K"] * 4 + ["Q4_K"] * 2 + ["Q6_K", "Q4_K"] and kinds[-5:] == ["Q6_K"] * 5
    assert kinds.count("Q6_K") == 19 and len(kinds) == 39


def test_workers_do_not_change_the_bytes(tmp_path: Path) -> None:
    def digest(name: str, n_workers: int, seed: int = 0) -> str:
        (tmp_path / name).mkdir()
        path = write_model(tmp_path / name / "m.gguf", WIDE, DEMO, seed=seed, n_workers=n_workers).path
        return hashlib.sha256(path.read_bytes()).hexdigest()

    one = digest("one", 1)
    assert one == digest("four", 4)
    assert one != digest("other", 4, seed=1)
    assert_valid(tmp_path / "one" / "m.gguf")


def assert_valid(path: Path) -> None:
    """Tensors lie where the header says, with the spread they should have; padding is unused and never likely."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.1.ffn_down_exps.weight"].tensor_type.name == "Q6_K"
    for name, std in (("blk.1.ffn_gate_exps.weight", 1 / 16), ("blk.1.ffn_down_exps.weight", 2048**-0.5)):
        experts = tensors[name].data  # [n_expert, rows, row bytes]
        assert len({expert.tobytes() for expert in experts}) == WIDE.n_expert, "two experts are alike"
        sample = quants.dequantize(np.ascontiguousarray(experts[-1][-8:]), tensors[name].tensor_type)
        assert sample.std() == pytest.approx(std, rel=0.15)
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    assert len(types) == WIDE.n_vocab and set(types[WIDE.n_token :]) == {int(gguf.TokenType.UNUSED)}
    assert reader.fields["tokenizer.ggml.tokens"].contents()[-1] == f"<unused{WIDE.n_vocab - WIDE.n_token - 1}>"
    embedding, head = (quants.dequantize(tensors[n].data, tensors[n].tensor_type) for n in ("token_embd.weight", "output.weight"))
    logits = embedding[300:8192:97] @ head.T
    assert logits.shape[1] == WIDE.n_vocab
    assert logits[:, WIDE.n_token :].max() < 0 < logits[:, : WIDE.n_token].max(axis=1).min()
    prompt = model_prompt(path, 2, 50)
    assert {t * WIDE.n_topics // WIDE.n_token for t in prompt} == {2}
    printed = click.testing.CliRunner().invoke(make_synthetic_moe.main, ["prompt", str(path), "--topic", "2", "--tokens", "50"])
    assert json.loads(printed.output) == prompt


def test_a_tile_is_cut_at_another_place_for_every_piece() -> None:
    spec = TensorSpec("a", (256, 2000, 64), gguf.GGMLQuantizationType.Q4_0, 0.05)  # experts of 16000 blocks
    tile = np.arange(100_000 * 18 // 2, dtype=np.uint16).view(np.uint8).reshape(-1, 18)
    made = list(tiled_pieces(spec, np.random.default_rng(0), tile))
    assert [len(piece) for piece in made] == [14563, 16000 - 14563] * 64
    assert len({piece.ctypes.data for piece in made}) == len(made)
    assert is_tiled(spec) and sum(piece.nbytes for piece in pieces(spec, 0, {(spec.kind, spec.fill): tile})) == spec.n_bytes
    small = TensorSpec("a", (256, 8), gguf.GGMLQuantizationType.Q4_0, 0.05)
    assert not is_tiled(small) and sum(piece.nbytes for piece in pieces(small, 0, {})) == small.n_bytes


def test_tiles_differ_by_type_spread_and_seed() -> None:
    q8, f16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16
    first = {make_tile(*key)[:16].tobytes() for key in ((0, q8, 0.1), (1, q8, 0.1), (0, q8, 0.2), (0, f16, 0.1))}
    assert len(first) == 4


def test_q6_k_holds_what_it_was_given() -> None:
    values = np.random.default_rng(0).standard_normal((16, 512), dtype=np.float32) * np.float32(0.05)
    values[0] = 0
    again = quants.dequantize(quantize_q6_k(values), gguf.GGMLQuantizationType.Q6_K)
    assert np.abs(again - values).max() < 0.005 and not again[0].any()


@pytest.mark.parametrize("preset", ["laguna-xs2", "gpt-oss-20b"])  # qwen36-35b-a3b has the routers of the first
def test_the_hot_part_misses_what_it_should(preset: str) -> None:
    s = PRESETS[preset]
    skew = skew_for_share(s.hot_share, 256, s.n_expert, s.n_used, s.n_topics, s.affinity)
    sample = RouterSample.make(256, s.n_expert, s.n_used, s.n_topics, s.affinity)
    assert 0 < skew < 10
    assert sample.share(skew) == pytest.approx(1 - 0.066, abs=0.003)
    assert sample.share(0) < 0.9 < sample.share(2 * skew)


@pytest.mark.parametrize(("follow", "distinct"), [(0.0, 100), (8.0, 950)])
def test_text_stays_on_its_topic_and_leaves_it_at_times(follow: float, distinct: int) -> None:
    topics = Topics.make(np.random.default_rng(0), 512, 8)
    rng = np.random.default_rng(1)
    head = output_head(rng, topics, 8192, topic_tokens=200, follow=follow, n_control=9)
    logits = embeddings(rng, topics, 8192)[9:1024] @ head.T  # tokens of topic 0
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    leaves = chances[:, 1024:].sum(axis=1) / chances.sum(axis=1)
    assert 1 / 400 < leaves.mean() < 1 / 50
    assert len(set(logits.argmax(axis=1))) > distinct
    assert follow == 0 or logits.argmax(axis=1).min() >= 9, "greedy text ends"


def test_prompts_of_a_topic() -> None:
    made = topic_prompt(0, 2000, n_topics=3, n_token=100, first=9)
    assert min(made) == 9 and max(made) == 33 and len(made) == 2000
    assert made == topic_prompt(0, 2000, n_topics=3, n_token=100, first=9)
    assert made != topic_prompt(0, 2000, n_topics=3, n_token=100, first=9, seed=1)
    assert min(topic_prompt(2, 2000, n_topics=3, n_token=100)) == 67
    with pytest.raises(ValueError, match="0 to 2"):
        topic_prompt(3, 1, n_topics=3, n_token=100)
    with pytest.raises(ValueError, match="control tokens only"):
        topic_prompt(0, 1, n_topics=3, n_token=100, first=34)


def test_a_model_of_another_program_has_no_topics() -> None:
    done = click.testing.CliRunner().invoke(make_synthetic_moe.main, ["prompt", str(DEMO), "--topic", "0", "--tokens", "5"])
    assert done.exit_code == 1 and "does not say which tokens have which topic" in done.output


def test_a_vocabulary_below_the_tokenizer_is_an_error(tmp_path: Path) -> None:
    args = ["model", "--preset", "qwen3moe", "--vocab", "8000", "--dry-run", "--out", str(tmp_path / "m.gguf")]
    done = click.testing.CliRunner().invoke(make_synthetic_moe.main, args)
    assert done.exit_code == 1 and "does not hold the 8192 tokens" in done.output


def test_tokens_of_a_topic_are_one_ring() -> None:
    of = np.array([0] * 5 + [1] * 7)
    before = previous_tokens(np.random.default_rng(0), of)
    token, seen = 6, []
    for _ in range(7):
        token = int(before[token])
        seen.append(token)
    assert sorted(seen) == [5, 6, 7, 8, 9, 10, 11] and token == 6
