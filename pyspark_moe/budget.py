"""What a configuration needs, in bytes, term by term. Pure: values in, values out.

The weights are exact. The key/value cache and the compute buffers are estimates from below: where the header does not say
how a model caches (which layers use a sliding window), the smaller size is taken. A start is refused only when even
that is more than there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .config import GIB
from .model_info import ModelInfo, largest_int

MIB = 1024**2

# Bytes of one cached element. Quantised types include their block scales.
CACHE_TYPE_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
# Every n-th layer sees the whole context when a model has a sliding window and does not say which layers use it.
_FULL_ATTENTION_EVERY = 6


@dataclass(frozen=True)
class Serving:
    """How the model will be used, as far as it costs memory. n_ctx 0: the model's own context; tokens.

    is_fitted    llama-server may shrink a context that nobody asked for (its --fit), default False
    n_ctx_least  but not below this, tokens
    n_gpu_layers llama-server's -ngl: layers on the GPU, -1 (default): all that fit, 0: none
    device       the GPU that the user named, in ggml's spelling; default "": the first
    """

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_parallel: int = 1
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    is_fitted: bool = False
    n_ctx_least: int = 4096
    n_gpu_layers: int = -1
    device: str = ""


@dataclass(frozen=True)
class Term:
    """One line of the bill. `is_estimate`: from below."""

    name: str
    n_bytes: int
    is_estimate: bool = False


def format_bytes(n: int) -> str:
    """Bytes for people: KiB below one MiB, MiB below one GiB, GiB above."""
    if 0 < n < MIB:
        return f"{n / 1024:.0f} KiB"
    if n < GIB:
        return f"{n / MIB:.1f} MiB"
    return f"{n / GIB:.2f} GiB"


def format_gib_flag(n: int) -> str:
    """Bytes as a number of GiB that is not below them: what to write after a flag."""
    digits = 3
    while digits < 9 and n / GIB < 10 ** (1 - digits):
        digits += 1
    scale = 10**digits
    return f"{math.ceil(n / GIB * scale) / scale:.{digits}f}".rstrip("0").rstrip(".")


def kv_cache_bytes(model: ModelInfo, serving: Serving) -> int:
    """Key/value cache of all sequences together, an estimate from below."""
    n_ctx = serving.n_ctx or model.n_ctx_train
    heads = model.metadata.get(f"{model.architecture}.attention.head_count_kv", model.get_int("attention.head_count"))
    n_head = max(1, model.get_int("attention.head_count", 1))
    key_length = model.get_int("attention.key_length", model.n_embd // n_head)
    value_length = model.get_int("attention.value_length", model.n_embd // n_head)
    if model.get_int("attention.kv_lora_rank"):
        value_length = 0  # compressed attention keeps one tensor; values are a view of it
    size_k = CACHE_TYPE_BYTES.get(serving.cache_type_k, min(CACHE_TYPE_BYTES.values()))
    size_v = CACHE_TYPE_BYTES.get(serving.cache_type_v, min(CACHE_TYPE_BYTES.values()))
    window = model.get_int("attention.sliding_window")
    pattern = model.get("attention.sliding_window_pattern")
    full_every = model.get_int("full_attention_interval", 1)

    total = 0.0
    for layer in range(model.n_layer):
        if full_every > 1 and (layer + 1) % full_every:
            continue  # a recurrent layer: its state does not grow with the context
        n_kv = largest_int(heads[layer] if isinstance(heads, tuple) and layer < len(heads) else heads if isinstance(heads, int) else 0, 0)
        n_tokens = n_ctx
        if window and _uses_window(layer, pattern):
            n_tokens = min(n_ctx, window * max(1, serving.n_parallel) + serving.n_ubatch)
        total += n_tokens * n_kv * (key_length * size_k + value_length * size_v)
    return int(total)


def _uses_window(layer: int, pattern: object) -> bool:
    if isinstance(pattern, tuple):
        return layer < len(pattern) and bool(pattern[layer])
    every = pattern if isinstance(pattern, int) and pattern > 0 else _FULL_ATTENTION_EVERY
    return (layer + 1) % every != 0


def compute_bytes(model: ModelInfo, serving: Serving) -> int:
    """Compute buffers, an estimate from below: a micro-batch of logits, or of the few activations that live at the same time."""
    n_ctx = serving.n_ctx or model.n_ctx_train
    n_tokens = min(serving.n_ubatch, serving.n_batch, n_ctx or serving.n_ubatch)
    return n_tokens * max(model.n_vocab, 8 * model.n_embd) * 4


def settle_context(model: ModelInfo, serving: Serving, physical_bytes: int) -> Serving:
    """The same with the context that llama-server will take: its --fit shrinks one that nobody asked for until the model,
    with all its experts, would leave 1 GiB of the machine's memory, whatever our slots save."""
    if serving.n_ctx:
        return serving
    most = model.n_ctx_train
    settled = replace(serving, n_ctx=most)
    least = min(serving.n_ctx_least, most)
    free = physical_bytes - GIB - model.tensor_bytes
    need_most, need_least = (_context_bytes(model, replace(serving, n_ctx=n)) for n in (most, least))
    if not serving.is_fitted or need_most <= free or need_most <= need_least:
        return settled
    share = max(0.0, (free - need_least) / (need_most - need_least))
    return replace(serving, n_ctx=least + int((most - least) * share))


def fit_context(model: ModelInfo, serving: Serving, budget: int) -> Serving:
    """The same with the longest context whose cache and buffers fit `budget` bytes, a multiple of 256 tokens; not below
    n_ctx_least, nor beyond what the model was trained for."""
    low, high = min(serving.n_ctx_least, model.n_ctx_train) // 256, model.n_ctx_train // 256
    while low < high:
        middle = (low + high + 1) // 2
        if _context_bytes(model, replace(serving, n_ctx=256 * middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return replace(serving, n_ctx=256 * max(low, 1))


def _context_bytes(model: ModelInfo, serving: Serving) -> int:
    return kv_cache_bytes(model, serving) + compute_bytes(model, serving)


def base_terms(model: ModelInfo, serving: Serving) -> tuple[Term, ...]:
    """Everything but the experts."""
    return (
        Term("weights that are not experts", model.other_bytes),
        Term(f"key/value cache of {serving.n_ctx or model.n_ctx_train} tokens", kv_cache_bytes(model, serving), is_estimate=True),
        Term("compute buffers", compute_bytes(model, serving), is_estimate=True),
    )


def total_bytes(terms: tuple[Term, ...]) -> int:
    return sum(term.n_bytes for term in terms)
