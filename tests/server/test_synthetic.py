"""The synthetic models themselves: valid blocks, real-looking routing, the same bytes for the same seed, sizes without writing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from pyspark_moe.store import Store
from runner import Model, llama
from synthetic import DEMO, PRESETS, ROOT, TINY, ModelFolder, models  # noqa: F401
from synthetic_moe.blocks import TYPES, random_rows, row_bytes, type_by_name
from synthetic_moe.routing import hot_share
from synthetic_moe.writer import write_model

TOOL = [sys.executable, str(ROOT / "scripts" / "make_synthetic_moe.py")]


@pytest.mark.parametrize("name", TYPES)
def test_blocks_have_the_wanted_spread(name: str) -> None:
    kind = type_by_name(name)
    data = random_rows(np.random.default_rng(1), kind, 64, 512, 0.05)
    assert data.shape == (64, row_bytes(kind, 512)) and data.dtype == np.uint8
    if name in ("F32", "F16"):
        values = data.view({"F32": np.float32, "F16": np.float16}[name]).astype(np.float32)
    else:
        values = quants.dequantize(data, kind)
    assert values.shape == (64, 512) and np.isfinite(values).all()
    assert 0.035 < values.std() < 0.075, values.std()
    assert abs(values.mean()) < 0.01


def test_rows_that_do_not_fit_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 256"):
        row_bytes(type_by_name("Q4_K"), 96)
    with pytest.raises(ValueError, match="cannot be made"):
        type_by_name("IQ2_XXS")


@pytest.mark.parametrize("preset", TINY)
def test_routing_is_skewed_and_depends_on_the_topic(preset: str, models: ModelFolder) -> None:
    path, shape = models.get(preset), PRESETS[preset]
    with Store(path) as store, Model(path, store) as model, model.context() as context:

        def uses(topic: int) -> list[np.ndarray]:
            store.reset_stats()
            low, high = topic * model.n_vocab // shape.n_topics, (topic + 1) * model.n_vocab // shape.n_topics
            tokens = np.random.default_rng(topic).integers(max(low, 300), high, 384)
            llama.llama_memory_clear(context.memory, True)
            context.decode(tokens, range(len(tokens)), every=384)
            return [store.counts(i) for i in range(len(store.layers) - shape.n_mtp)]

        by_topic = [uses(topic) for topic in range(shape.n_topics)]
    shares = [hot_share(np.sum([topic[i] for topic in by_topic], axis=0)) for i in range(len(by_topic[0]))]
    assert np.mean(shares) > 0.85, shares
    for i in range(len(by_topic[0])):
        parts = [topic[i] / topic[i].sum() for topic in by_topic]
        assert np.abs(parts[0] - parts[1]).sum() > 0.1, "two topics use the experts alike"


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    shape = PRESETS["gpt-oss"].with_changes(n_layer=1)
    made = []
    for folder, seed in (("one", 1), ("again", 1), ("other", 2)):
        (tmp_path / folder).mkdir()
        made.append(write_model(tmp_path / folder / "model.gguf", shape, DEMO, seed=seed).path.read_bytes())
    assert made[0] == made[1] != made[2]


def test_split_writes_shards(tmp_path: Path) -> None:
    written = write_model(tmp_path / "m.gguf", PRESETS["qwen3moe"].with_changes(n_layer=1), DEMO, split_max_tensors=5)
    assert len(written.files) > 2 and all(f.is_file() for f in written.files)
    assert written.path.name == f"m-00001-of-{len(written.files):05d}.gguf"
    names = [t.name for f in written.files for t in gguf.GGUFReader(f).tensors]
    assert len(names) == len(set(names)) > 10


def test_sizes_without_writing(tmp_path: Path) -> None:
    out = tmp_path / "big.gguf"
    done = subprocess.run([*TOOL, "model", "--preset", "xs2", "--out", str(out), "--dry-run", "--skew", "2"], capture_output=True, text=True, check=True)
    assert "experts 19,422.0 MiB" in done.stdout and not out.exists()


def test_impossible_sizes_are_an_error(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    for args, message in ((["--used", "99"], "99 experts of 16"), (["--type", "Q4_K", "--ff-exp", "100", "--down-type", "Q4_K"], "blocks of 256")):
        done = subprocess.run([*TOOL, "model", "--preset", "qwen3moe", "--out", str(out), *args], capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
        assert not out.exists()
