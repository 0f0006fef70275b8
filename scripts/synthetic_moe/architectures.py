"""Tensors and metadata of the architectures that can be made, as llama.cpp's src/models/<arch>.cpp reads them.

Chosen for what they do differently with experts: qwen3moe (softmax, scales), qwen35moe (fused gate and up, shared
expert, recurrent layers, multi-token prediction), gpt-oss (biases, MXFP4), laguna (sigmoid with selection bias, dense
first layer, sliding window), deepseek2 (expert groups), llama4 (weights before the product, every second layer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .shape import Shape
from .tensors import Parts, TensorSpec

Value = int | float | bool | str | list[int]


@dataclass(frozen=True)
class Architecture:
    """metadata: keys without the leading "<arch>."; layer: the tensors of block `index`, named from `prefix` on."""

    metadata: Callable[[Shape], dict[str, Value]]
    layer: Callable[[Parts, int, str], Iterator[TensorSpec]]


def common_metadata(s: Shape) -> dict[str, Value]:
    """What every architecture has."""
    data: dict[str, Value] = {
        "vocab_size": s.n_vocab, "context_length": s.n_ctx, "embedding_length": s.n_embd,
        "block_count": s.n_layer + s.n_mtp, "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head, "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.head_dim, "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0, "rope.dimension_count": s.head_dim,
    }  # fmt: skip
    if s.n_expert:
        data |= {"expert_count": s.n_expert, "expert_used_count": s.n_used, "expert_feed_forward_length": s.n_ff_exp}
    return data


def qwen3_layer(p: Parts, index: int, b: str) -> Iterator[TensorSpec]:
    yield p.ones(f"{b}attn_norm.weight", p.shape.n_embd)
    yield from p.attention(b)
    yield from p.qk_norms(b)
    yield p.ones(f"{b}ffn_norm.weight", p.shape.n_embd)
    if p.shape.n_expert:
        yield from p.experts(b, index)
    else:
        yield from p.feed_forward(b, p.shape.n_ff)


def qwen35moe_metadata(s: Shape) -> dict[str, Value]:
    n_rot = s.n_rot or s.head_dim // 2
    data: dict[str, Value] = {
        "rope.dimension_count": n_rot, "rope.dimension_sections": [n_rot // 4, n_rot // 8, n_rot // 8, 0],
        "expert_shared_feed_forward_length": s.n_ff_exp, "full_attention_interval": s.full_interval,
        "ssm.conv_kernel": s.ssm_conv, "ssm.inner_size": s.ssm_state * s.ssm_heads, "ssm.state_size": s.ssm_state,
        "ssm.time_step_rank": s.ssm_heads, "ssm.group_count": s.ssm_groups,
    }  # fmt: skip
    return data | ({"nextn_predict_layers": s.n_mtp} if s.n_mtp else {})


def qwen35moe_layer(p: Parts, index: int, b: str) -> Iterator[TensorSpec]:
    s = p.shape
    is_mtp = index >= s.n_layer
    yield p.ones(f"{b}attn_norm.weight", s.n_embd)
    yield p.ones(f"{b}post_attention_norm.weight", s.n_embd)
    if is_mtp or (index + 1) % s.full_interval == 0:
        yield from p.attention(b, q_factor=2)
        yield from p.qk_norms(b)
    else:
        key, value = s.ssm_state * s.ssm_groups, s.ssm_state * s.ssm_heads
        yield p.matrix(f"{b}attn_qkv.weight", s.n_embd, 2 * key + value)
        yield p.matrix(f"{b}attn_gate.weight", s.n_embd, value)
        yield p.values(f"{b}ssm_conv1d.weight", (s.ssm_conv, 2 * key + value), 0.5)
        yield p.values(f"{b}ssm_dt.bias", (s.ssm_heads,), 0.1)
        yield p.values(f"{b}ssm_a", (s.ssm_heads,), 0.05, -0.5)  # negative: the state decays
        yield p.matrix(f"{b}ssm_beta.weight", s.n_embd, s.ssm_heads)
        yield p.matrix(f"{b}ssm_alpha.weight", s.n_embd, s.ssm_heads)
        yield p.ones(f"{b}ssm_norm.weight", s.ssm_state)
        yield p.matrix(f"{b}ssm_out.weight", value, s.n_embd, 0.5)
    yield from p.experts(b, index)
    yield p.values(f"{b}ffn_gate_inp_shexp.weight", (s.n_embd,), s.n_embd**-0.5)
    yield from p.feed_forward(b, s.n_ff_exp, "_shexp")
    if is_mtp:
        yield p.matrix(f"{b}nextn.eh_proj.weight", 2 * s.n_embd, s.n_embd)
        yield p.ones(f"{b}nextn.enorm.weight", s.n_embd)
        yield p.ones(f"{b}nextn.hnorm.weight", s.n_embd)


def gpt_oss_metadata(s: Shape) -> dict[str, Value]:
    return {"attention.sliding_window": 128}


def gpt_oss_layer(p: Parts, index: int, b: str) -> Iterator[TensorSpec]:
    s = p.shape
    yield p.ones(f"{b}attn_norm.weight", s.n_embd)
    yield p.ones(f"{b}post_attention_norm.weight", s.n_embd)
    yield from p.attention(b)
    for name, n in (("q", s.n_head * s.head_dim), ("k", s.n_head_kv * s.head_dim), ("v", s.n_head_kv * s.head_dim), ("output", s.n_embd)):
        yield p.values(f"{b}attn_{name}.bias", (n,), 0.02)
    yield p.values(f"{b}attn_sinks.weight", (s.n_head,), 0.5)
    yield from p.experts(b, index)
    yield p.values(f"{b}ffn_gate_inp.bias", (s.n_expert,), 0.1)
    yield p.values(f"{b}ffn_gate_exps.bias", (s.n_ff_exp, s.n_expert), 0.1)
    yield p.values(f"{b}ffn_up_exps.bias", (s.n_ff_exp, s.n_expert), 0.1)
    yield p.values(f"{b}ffn_down_exps.bias", (s.n_embd, s.n_expert), 0.1)


def laguna_heads(s: Shape, index: int) -> int:
    """Full layers (every fourth) have three quarters of the heads of sliding-window layers."""
    return s.n_head * 3 // 4 if index % 4 == 0 else s.n_head


def laguna_metadata(s: Shape) -> dict[str, Value]:
    return {
        "attention.head_count": [laguna_heads(s, i) for i in range(s.n_layer)], "attention.sliding_window": 512,
        "leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5,
        "expert_shared_count": 1, "expert_shared_feed_forward_length": s.n_ff_exp,
        "rope.dimension_count": s.head_dim // 2, "rope.dimension_count_swa": s.head_dim,
        "rope.freq_base": 500000.0, "rope.freq_base_swa": 10000.0,
    }  # fmt: skip


def laguna_layer(p: Parts, index: int, b: str) -> Iterator[TensorSpec]:
    s = p.shape
    yield p.ones(f"{b}attn_norm.weight", s.n_embd)
    yield from p.attention(b, laguna_heads(s, index))
    yield from p.qk_norms(b)
    yield p.matrix(f"{b}attn_gate.weight", s.n_embd, laguna_heads(s, index))
    yield p.ones(f"{b}ffn_norm.weight", s.n_embd)
    if index == 0:
        yield from p.feed_forward(b, s.n_ff)
        return
    yield from p.experts(b, index)
    yield p.values(f"{b}exp_probs_b.bias", (s.n_expert,), 0.02)
    yield from p.feed_forward(b, s.n_ff_exp, "_shexp")


N_ROPE, KV_RANK = 32, 64


def deepseek2_metadata(s: Shape) -> dict[str, Value]:
    return {
        "attention.head_count_kv": s.n_head, "attention.key_length": s.head_dim + N_ROPE,
        "attention.q_lora_rank": 0, "attention.kv_lora_rank": KV_RANK, "rope.dimension_count": N_ROPE,
        "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_norm": True,
        "expert_weights_scale": 1.0, "expert_group_count": 4, "expert_group_used_count": 2,
    }  # fmt: skip


def deepseek2_layer(p: Parts, index: int, b: str) -> Iterator[TensorSpec]:
    s = p.shape
    yield p.ones(f"{b}attn_norm.weight", s.n_embd)
    yield p.ones(f"{b}attn_kv_a_norm.weight", KV_RANK)
    yield p.matrix(f"{b}attn_q.weight", s.n_embd, s.n_head * (s.head_dim + N_ROPE))
    yield p.matrix(f"{b}attn_kv_a_mqa.weight", s.n_embd, KV_RANK + N_ROPE)
    yield p.matrix(f"{b}attn_kv_b.weight", KV_RANK, s.n_head * 2 * s.head_dim)
    yield p.matrix(f"{b}attn_output.weight", s.n_head * s.head_dim, s.n_embd, 0.5)
    yield p.ones(f"{b}ffn_norm.weight", s.n_embd)
    if index == 0:
        yield from p.feed_forward(b, s.n_ff)
        return
    yield from p.experts(b, index)
    yield p.values(f"{b}exp_probs_b.bias", (s.n_expert,), 0.02)
    yield from p.feed_forward(b, s.n_ff_exp, "_shexp")


def llama4_metadata(s: Shape) -> dict[str, Value]:
    return {"interleave_moe_layer_step": 2}


def llama4_layer(p: Parts, index: int, b: str) -> Iterator[TensorSpec]:
    s = p.shape
    yield p.ones(f"{b}attn_norm.weight", s.n_embd)
    yield from p.attention(b)
    yield p.ones(f"{b}ffn_norm.weight", s.n_embd)
    if index % 2 == 0:
        yield from p.feed_forward(b, s.n_ff)
        return
    yield from p.experts(b, index)
    yield from p.feed_forward(b, s.n_ff_exp, "_shexp")


ARCHITECTURES: dict[str, Architecture] = {
    "qwen3": Architecture(lambda s: {}, qwen3_layer),
    "qwen3moe": Architecture(lambda s: {}, qwen3_layer),
    "qwen35moe": Architecture(qwen35moe_metadata, qwen35moe_layer),
    "gpt-oss": Architecture(gpt_oss_metadata, gpt_oss_layer),
    "laguna": Architecture(laguna_metadata, laguna_layer),
    "deepseek2": Architecture(deepseek2_metadata, deepseek2_layer),
    "llama4": Architecture(llama4_metadata, llama4_layer),
}
