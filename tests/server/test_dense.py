"""A dense model: --spark has nothing to do, says so in one line, and serving goes on; a budget for it is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from harness import TARGET, Server, run_server

N_EMBD, N_FF, N_HEAD, N_LAYER = 64, 128, 4, 2


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with random weights and the demo model's tokenizer."""
    path = tmp_path_factory.mktemp("dense") / "dense model ü.gguf"
    source = gguf.GGUFReader(TARGET)
    tokens = source.fields["tokenizer.ggml.tokens"].contents()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("dense test model")
    writer.add_block_count(N_LAYER)
    writer.add_context_length(256)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(source.fields["tokenizer.ggml.token_type"].contents())
    writer.add_token_merges(source.fields["tokenizer.ggml.merges"].contents())
    writer.add_eos_token_id(0)
    rng = np.random.default_rng(1)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * 0.05).astype(np.float32))

    add("token_embd.weight", len(tokens), N_EMBD)
    writer.add_tensor("output_norm.weight", np.ones(N_EMBD, np.float32))
    for i in range(N_LAYER):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(N_EMBD, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{name}.weight", N_EMBD, N_EMBD)
        add(f"blk.{i}.ffn_gate.weight", N_FF, N_EMBD)
        add(f"blk.{i}.ffn_up.weight", N_FF, N_EMBD)
        add(f"blk.{i}.ffn_down.weight", N_EMBD, N_FF)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_serving_goes_on(start: Callable[..., Server], dense: Path) -> None:
    server = start(dense, "--spark", "-c", 256)
    ours = [line for line in server.log.splitlines() if line.startswith("spark:")]
    assert len(ours) == 1 and "is a dense model" in ours[0] and "nothing to do" in ours[0]
    assert len(server.complete("a b c", n=4)) > 0
    assert server.get("/props")["spark"]["active"] is False


@pytest.mark.parametrize("budget", [["--spark-ram", "1"], ["--spark-slots", "4"]])
def test_a_budget_is_an_error(dense: Path, budget: list[str]) -> None:
    done = run_server([str(dense), *budget, "--port", "0"])
    assert done.returncode == 1
    assert "is a dense model" in done.stderr and "Remove --spark-ram" in done.stderr
