"""What a synthetic model looks like: one frozen description, and ready ones for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """Sizes and storage of a synthetic model. Types are GGUF names such as Q4_K."""

    arch: str
    n_layer: int = 3
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_expert: int = 16  # 0: a dense model
    n_used: int = 4  # experts a token selects
    n_ff_exp: int = 128
    n_ff: int = 512  # of dense layers
    n_vocab: int = 8192
    n_control: int = 9  # control tokens, the first ids of the tokenizer
    n_token: int = 8192  # tokens of the tokenizer; the ids from there to n_vocab are padding, which no text has
    n_ctx: int = 4096
    expert_type: str = "Q4_0"  # gate and up
    down_type: str = "Q4_0"
    down_rest_type: str | None = None  # down of the layers that down_is_high leaves out; None: as the others
    dense_type: str = "Q8_0"  # everything else that is a matrix
    vocab_type: str = "Q8_0"  # embedding and output head
    fused: bool = False  # gate and up in one tensor
    scales: bool = False  # a scale for each expert
    n_rot: int = 0  # values of a head that are rotated; 0: what the architecture usually does
    ssm_heads: int = 4  # value heads of a recurrent layer (gated delta net)
    ssm_groups: int = 2  # its key heads
    ssm_state: int = 128
    ssm_conv: int = 4
    full_interval: int = 4  # every so many-th layer has attention, the others are recurrent
    n_mtp: int = 0  # multi-token-prediction blocks at the end, which a target does not run
    n_topics: int = 4
    skew: float | None = None  # None: the one that gives hot_share
    hot_share: float = 0.93  # of the routing, for the hottest 60 % of the experts
    affinity: float = 0.5  # how differently topics use experts; 0: alike
    topic_tokens: int = 20  # after so many sampled tokens, on average, text leaves its topic (temperature 1)
    follow: float = 0.0  # logit of the token that follows each, see routing.output_head; 0: none does
    embd_rms: float = 1.0  # of an embedding. What a layer adds is below one: a deep model that is to route by topic
    #                        to its last layer needs an embedding that stands out of the sum of all layers

    @property
    def expert_bytes_by_type(self) -> tuple[int, int]:
        """Values of (gate and up, down) of one expert."""
        return 2 * self.n_embd * self.n_ff_exp, self.n_embd * self.n_ff_exp

    def down_is_high(self, index: int) -> bool:
        """Whether layer `index` stores its down in down_type: the half that llama.cpp's Q4_K_M stores so."""
        eighth = self.n_layer // 8
        return index < eighth or index >= 7 * self.n_layer // 8 or (index - eighth) % 3 == 2

    def with_changes(self, **changes: object) -> "Shape":
        """A copy with the values that are not None replaced."""
        return replace(self, **{key: value for key, value in changes.items() if value is not None})


# Strides of the tiny ones are no multiples of a page, so that neighbouring experts share pages.
PRESETS: dict[str, Shape] = {
    "qwen3moe": Shape("qwen3moe"),
    "qwen3moe-scales": Shape("qwen3moe", scales=True, expert_type="Q8_0", down_type="Q8_0"),
    "qwen35moe": Shape("qwen35moe", n_layer=4, n_ff_exp=96, expert_type="Q4_0", down_type="Q8_0"),
    "qwen35moe-fused": Shape("qwen35moe", n_layer=4, n_ff_exp=256, expert_type="Q4_K", down_type="Q6_K", fused=True),
    "qwen35moe-mtp": Shape("qwen35moe", n_layer=4, n_ff_exp=96, n_mtp=1),
    "gpt-oss": Shape("gpt-oss", n_embd=192, n_head=4, head_dim=64, n_ff_exp=160, expert_type="MXFP4", down_type="MXFP4"),
    "laguna": Shape("laguna", n_layer=4, n_head=8, n_ff_exp=256, expert_type="Q4_K", down_type="Q6_K"),
    "deepseek2-groups": Shape("deepseek2", n_layer=3, head_dim=64, n_ff_exp=64, expert_type="Q8_0", down_type="Q8_0"),
    "llama4": Shape("llama4", n_layer=4, n_used=1, n_ff_exp=128, affinity=1.0, expert_type="F16", down_type="F16"),
    "dense": Shape("qwen3", n_expert=0, n_used=0),
    # 20 KiB to 1.8 MB an expert, a few hundred MB to several GiB in all
    "bench-small": Shape("qwen3moe", n_layer=8, n_embd=512, n_head=8, n_expert=64, n_used=6, n_ff_exp=256,
                         expert_type="Q4_K", down_type="Q6_K"),
    "bench-6gib": Shape("qwen3moe", n_layer=28, n_embd=1024, n_head=8, n_head_kv=2, head_dim=128, n_expert=128,
                        n_used=8, n_ff_exp=1024, expert_type="Q4_K", down_type="Q6_K"),
    "xs2": Shape("laguna", n_layer=40, n_embd=2048, n_head=64, n_head_kv=8, head_dim=128, n_expert=256, n_used=8,
                 n_ff_exp=512, n_ff=8192, expert_type="Q4_K", down_type="Q6_K"),
}  # fmt: skip

# How a published model routes: eight topics that differ, and a hot part that misses 6.6 % of the selections of their mix.
_ROUTED = Shape("", n_topics=8, hot_share=0.934, affinity=0.7, topic_tokens=200, follow=8.0, embd_rms=20.0)
_Q4_K_M = _ROUTED.with_changes(expert_type="Q4_K", down_type="Q6_K", down_rest_type="Q4_K", dense_type="Q4_K", vocab_type="Q6_K")

# The true shapes of published models, 11 to 20 GiB each, in the storage that most people load.
PRESETS |= {
    # config.json of poolside/Laguna-XS.2 (33.4 G weights): 48 heads in full layers, 64 in sliding-window layers
    "laguna-xs2": _Q4_K_M.with_changes(
        arch="laguna", n_layer=40, n_embd=2048, n_head=64, n_head_kv=8, head_dim=128, n_expert=256, n_used=8,
        n_ff_exp=512, n_ff=8192, n_vocab=100352, n_ctx=131072),
    # model card of Qwen/Qwen3.6-35B-A3B (35 G weights; Qwen3.5-35B-A3B is the same shape), text part without the
    # multi-token-prediction block; keys of its GGUF as llama.cpp's issue 25121 prints them
    "qwen36-35b-a3b": _Q4_K_M.with_changes(
        arch="qwen35moe", n_layer=40, n_embd=2048, n_head=16, n_head_kv=2, head_dim=256, n_rot=64, n_expert=256, n_used=8,
        n_ff_exp=512, n_vocab=248320, n_ctx=262144, ssm_heads=32, ssm_groups=16, ssm_state=128, ssm_conv=4, full_interval=4),
    # config.json of openai/gpt-oss-20b (20.9 G weights) in the storage of ggml-org's GGUF, 11.3 GiB
    "gpt-oss-20b": _ROUTED.with_changes(
        arch="gpt-oss", n_layer=24, n_embd=2880, n_head=64, n_head_kv=8, head_dim=64, n_expert=32, n_used=4,
        n_ff_exp=2880, n_ff=2880, n_vocab=201088, n_ctx=131072, expert_type="MXFP4", down_type="MXFP4"),
}  # fmt: skip

TINY: tuple[str, ...] = (
    "qwen3moe", "qwen3moe-scales", "qwen35moe", "qwen35moe-fused", "qwen35moe-mtp", "gpt-oss", "laguna",
    "deepseek2-groups", "llama4",
)  # fmt: skip

FULL_SIZE: tuple[str, ...] = ("laguna-xs2", "qwen36-35b-a3b", "gpt-oss-20b")
