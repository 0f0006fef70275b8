"""Which types of K and V a KV cache can have together. Pure: checked before anything is loaded; only explicit flags change types.

The types are llama-server's (`kv_cache_types` in its common/arg.cpp). Every K goes with every V, except: a quantised V needs flash
attention, and attention on a GPU does not read iq4_nl (ggml-cuda/fattn.cu). llama.cpp finds this when it makes the context of the
target, or of the draft, which may be minutes after the start. Whether blocks divide the heads of a model stays its check.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ConfigError

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_FLOAT = ("f32", "f16", "bf16")
_NOT_ON_GPU = ("iq4_nl",)


def supported_pairs(*, is_on_gpu: bool, has_flash_attention: bool) -> list[tuple[str, str]]:
    """(K, V) pairs that work, in the order of TYPES. has_flash_attention: False when the user turned it off."""
    types = [kind for kind in TYPES if not (is_on_gpu and kind in _NOT_ON_GPU)]
    return [(k, v) for k in types for v in types if v in _FLOAT or has_flash_attention]


def check_pair(k: str, v: str, flags: tuple[str, str], pairs: Sequence[tuple[str, str]]) -> None:
    """Raises ConfigError with the list when (k, v) is not among `pairs`. flags: the two that name the types."""
    if (k, v) in pairs:
        return
    ks, vs = (", ".join(dict.fromkeys(pair[part] for pair in pairs)) for part in (0, 1))
    raise ConfigError(f"{flags[0]} {k} with {flags[1]} {v} does not work here. Supported: K any of {ks}, with V any of {vs}.")
