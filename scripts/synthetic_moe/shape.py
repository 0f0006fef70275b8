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
    n_vocab: int = 8192  # reduced or refused to fit the tokenizer
    n_ctx: int = 4096
    expert_type: str = "Q4_0"  # gate and up
    down_type: str = "Q4_0"
    dense_type: str = "Q8_0"  # everything else that is a matrix
    fused: bool = False  # gate and up in one tensor
    scales: bool = False  # a scale for each expert
    n_mtp: int = 0  # multi-token-prediction blocks at the end, which a target does not run
    n_topics: int = 4
    skew: float | None = None  # None: the one that gives hot_share
    hot_share: float = 0.93  # of the routing, for the hottest 60 % of the experts
    affinity: float = 0.5  # how differently topics use experts; 0: alike

    @property
    def expert_bytes_by_type(self) -> tuple[int, int]:
        """Values of (gate and up, down) of one expert."""
        return 2 * self.n_embd * self.n_ff_exp, self.n_embd * self.n_ff_exp

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
    "llama4": Shape("llama4", n_layer=4, n_used=1, n_ff_exp=128, expert_type="F16", down_type="F16"),
    "dense": Shape("qwen3", n_expert=0, n_used=0),
    # 20 KiB to 1.8 MB an expert, a few hundred MB to several GiB in all
    "bench-small": Shape("qwen3moe", n_layer=8, n_embd=512, n_head=8, n_expert=64, n_used=6, n_ff_exp=256,
                         expert_type="Q4_K", down_type="Q6_K"),
    "bench-6gib": Shape("qwen3moe", n_layer=28, n_embd=1024, n_head=8, n_head_kv=2, head_dim=128, n_expert=128,
                        n_used=8, n_ff_exp=1024, expert_type="Q4_K", down_type="Q6_K"),
    "xs2": Shape("laguna", n_layer=40, n_embd=2048, n_head=64, n_head_kv=8, head_dim=128, n_expert=256, n_used=8,
                 n_ff_exp=512, n_ff=8192, expert_type="Q4_K", down_type="Q6_K"),
}  # fmt: skip

TINY: tuple[str, ...] = (
    "qwen3moe", "qwen3moe-scales", "qwen35moe", "qwen35moe-fused", "qwen35moe-mtp", "gpt-oss", "laguna",
    "deepseek2-groups", "llama4",
)  # fmt: skip
