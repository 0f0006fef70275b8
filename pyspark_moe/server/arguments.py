"""Looks into llama-server arguments without knowing them all: finds the model, reads single values. Pure.

llama-server's own parser has the last word on everything here; these functions only read what they must.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..budget import Serving
from ..errors import ConfigError

MODEL_FLAGS = ("-m", "--model")
# Flags of llama-server whose value may be a .gguf file. A .gguf after any other flag is the model.
GGUF_VALUED_FLAGS = frozenset(
    (
        *MODEL_FLAGS,
        "-md",
        "--model-draft",
        "--spec-draft-model",
        "-mv",
        "--model-vocoder",
        "-mm",
        "--mmproj",
        "-hff",
        "--hf-file",
        "-hffv",
        "--hf-file-v",
        "--lora",
        "--lora-scaled",
        "--control-vector",
        "--control-vector-scaled",
        "-mmu",
        "--mmproj-url",
        "-mu",
        "--model-url",
    )
)


@dataclass(frozen=True)
class LlamaArguments:
    """What goes to llama-server, without argv[0]. `model`: the local model file that -m names, or None."""

    args: tuple[str, ...]
    model: str | None


def take_model(args: Sequence[str], is_file: Callable[[str], bool] = os.path.isfile) -> LlamaArguments:
    """Turns a model given by position into `-m MODEL`.

    By position means: an argument that is not a flag, ends in .gguf and does not follow a flag that takes a .gguf; or the
    first argument when it is an existing file, whatever its name. Raises ConfigError when two models are named.
    """
    named = value_of(args, MODEL_FLAGS)
    found: list[int] = []
    for i, arg in enumerate(args):
        if arg.startswith("-") or (i > 0 and args[i - 1] in GGUF_VALUED_FLAGS):
            continue
        if arg.lower().endswith(".gguf") or (i == 0 and is_file(arg)):
            found.append(i)
    if not found:
        return LlamaArguments(tuple(args), named)
    model = args[found[0]]
    other = args[found[1]] if len(found) > 1 else named
    if other is not None:
        raise ConfigError(f"Two models are given, '{model}' and '{other}': give one.")
    return LlamaArguments((*args[: found[0]], "-m", model, *args[found[0] + 1 :]), model)


def value_of(args: Sequence[str], flags: Sequence[str]) -> str | None:
    """The value of the last of `flags` (two spellings of one flag), or None."""
    for i in range(len(args) - 2, -1, -1):
        if args[i] in flags:
            return args[i + 1]
    return None


def _int_of(args: Sequence[str], flags: Sequence[str], default: int) -> int:
    value = value_of(args, flags)
    try:
        return default if value is None else int(value)
    except ValueError:
        return default  # llama-server refuses it with its own words


def read_serving(args: Sequence[str]) -> Serving:
    """What the arguments say about memory, for a plan without loading. Values of a config file or preset are not seen."""
    n_parallel = _int_of(args, ("-np", "--parallel"), -1)
    return Serving(
        n_ctx=max(0, _int_of(args, ("-c", "--ctx-size"), 0)),
        n_batch=_int_of(args, ("-b", "--batch-size"), 2048),
        n_ubatch=_int_of(args, ("-ub", "--ubatch-size"), 512),
        n_parallel=n_parallel if n_parallel > 0 else 4,  # llama-server's own choice
        cache_type_k=value_of(args, ("-ctk", "--cache-type-k")) or "f16",
        cache_type_v=value_of(args, ("-ctv", "--cache-type-v")) or "f16",
        is_fitted=value_of(args, ("-fit", "--fit")) not in ("off", "false", "0") and value_of(args, ("-c", "--ctx-size")) is None,
        n_ctx_least=_int_of(args, ("-fitc", "--fit-ctx"), 4096),
        n_gpu_layers=_int_of(args, ("-ngl", "--gpu-layers", "--n-gpu-layers"), -1),
        device=(value_of(args, ("-dev", "--device")) or "").split(",")[0],
    )


def draft_tokens(args: Sequence[str]) -> int | None:
    """How many tokens the arguments have drafted at once; None where they do not say, or no number."""
    n = _int_of(args, ("--spec-draft-n-max",), -1)
    return n if n >= 0 else None


_OVERRIDE_FLAGS = ("-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe")


def has_overrides(args: Sequence[str]) -> bool:
    """Whether the user places tensors with llama-server's own flags."""
    return any(arg in _OVERRIDE_FLAGS for arg in args)


@dataclass(frozen=True)
class CachePair:
    """Types of K and V that the arguments give to one KV cache, and the flags that name them."""

    k: str
    v: str
    flags: tuple[str, str]


def cache_pairs(args: Sequence[str]) -> list[CachePair]:
    """Of the target, and of the draft; llama-server's defaults where nothing is said."""
    spellings = (
        (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")),
        (("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"), ("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft")),
    )
    return [CachePair(value_of(args, k) or "f16", value_of(args, v) or "f16", (k[-1], v[-1])) for k, v in spellings]


def has_flash_attention(args: Sequence[str]) -> bool:
    """False when the arguments turn flash attention off."""
    return value_of(args, ("-fa", "--flash-attn")) not in ("off", "disabled", "false", "0")
