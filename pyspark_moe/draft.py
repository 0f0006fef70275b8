"""Which kind of draft model a GGUF is, whether it fits a target, and the llama-server arguments that use the pair.

llama.cpp finds some misfits at the first request, by aborting the process, and some never: it then serves without
drafting. So the pair is checked here, from the two headers, before anything is loaded.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from .errors import DraftError, ModelFileError
from .gguf_header import Value, read_gguf_header
from .model_info import largest_int, read_model_info

SIMPLE, MTP, EAGLE3, DFLASH, DSPARK = "draft-simple", "draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"

# As in llama.cpp's common_speculative_are_compatible: the first tokens are special ones that may have other texts, and
# vocabularies may be padded differently.
_FIRST_COMPARED_TOKEN = 5
_MAX_SIZE_DIFFERENCE = 128
_TOKEN_TYPE_UNUSED = 5
_MAX_BLOCK = 128  # tokens; blocks that are in use have 8 to 16, and llama.cpp ends the process for one that its graph has no room for
_KEPT = frozenset(("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"))


@dataclass(frozen=True)
class _Header:
    """What the check needs of a model, over all its shards. shapes: tensor name -> dimensions, ne[0] first."""

    path: Path
    arch: str
    values: dict[str, Value]
    shapes: dict[str, tuple[int, ...]]

    def number(self, key: str, default: int = 0) -> int:
        """An integer `<arch>.<key>`; for a per-layer array its largest element."""
        return largest_int(self.values.get(f"{self.arch}.{key}", default), default)


@cache
def _targets() -> dict[str, list[str]]:
    """Fact -> architectures, generated from the sources of this build by scripts/draft_targets.py."""
    return json.loads(resources.files("pyspark_moe").joinpath("data/draft_targets.json").read_text())


def _detect(draft: _Header, target: _Header | None) -> str:
    """The llama-server speculative type (`--spec-type`) of a draft model: one of the constants above.

    A model with a next-token head is an MTP draft when it fits the target's hidden size (or no target is given), and
    else a plain draft, if it is complete. Raises DraftError when it is none of the kinds.
    """
    if draft.arch == "dflash":
        return DSPARK if "markov_w1.weight" in draft.shapes else DFLASH
    if draft.arch == "eagle3":
        return EAGLE3
    is_complete = "token_embd.weight" in draft.shapes and "blk.0.attn_norm.weight" in draft.shapes
    has_head = any(".nextn.eh_proj." in name or name.startswith("nextn.") for name in draft.shapes)
    if has_head and not (is_complete and target is not None and _hidden_out(draft) != _hidden_out(target)):
        return MTP
    if is_complete:
        return SIMPLE
    raise DraftError(
        f"'{draft.path}' (architecture '{draft.arch}') is no draft model: it has neither a DFlash, EAGLE-3 or next-token "
        "(MTP) head nor the layers of a language model. Give a draft made for the target."
    )


def resolve(draft_path: str | Path, target_path: str | Path | None) -> list[str]:
    """llama-server arguments for a draft and its target, after checking that they fit.

    target_path None: the target is not known yet (a download); only the draft itself is checked. Shards: name the
    first. Raises DraftError, with the values that do not fit and what to do.
    """
    draft = _read(draft_path, "draft model")
    target = None if target_path is None else _read(target_path, "target model")
    kind = _detect(draft, target)
    if target is not None and target.path.resolve() == draft.path.resolve():
        if kind != MTP:
            raise DraftError(f"'{draft.path}' is given as the target and as its draft, and it has no next-token (MTP) head. Give another draft, or none.")
        _check_exposes(draft, target, "nextn")
        return ["--spec-type", MTP]
    if target is not None:
        _check_pair(kind, draft, target)
    return ["--spec-type", kind, "--spec-draft-model", str(draft_path)]


def most_drafted(draft_path: str | Path, wanted: int | None = None) -> int:
    """Tokens that are worth proposing for one step, 1 to 63, no more than `wanted`: a block draft's whole block, which it computes at
    once; of the kinds that compute one token after the other what is wanted, or eight. Raises DraftError."""
    draft = _read(draft_path, "draft model")
    if draft.arch != "dflash":
        return wanted or 8
    is_anchor_first = _detect(draft, None) == DSPARK and draft.values.get("dflash.sample_from_anchor", True) is True
    return max(1, min(wanted or 63, draft.number("block_size", 16) - (not is_anchor_first)))  # as common/speculative.cpp reads the file


def _read(path: str | Path, role: str) -> _Header:
    try:
        info = read_model_info(path)
        values = read_gguf_header(path, _KEPT).metadata
        shapes = {t.name: t.shape for shard in info.shards for t in read_gguf_header(shard).tensors}
    except ModelFileError as e:
        raise DraftError(f"the {role} cannot be read: {e}") from e
    return _Header(info.path, info.architecture, values, shapes)


def _check_pair(kind: str, draft: _Header, target: _Header) -> None:
    if kind in (DFLASH, DSPARK) and not 1 <= (size := draft.number("block_size", 16)) <= _MAX_BLOCK:
        raise DraftError(f"the draft model '{draft.path}' says that it drafts blocks of {size} tokens; 1 to {_MAX_BLOCK} can be. Download or convert it again.")
    if kind in (DFLASH, DSPARK, EAGLE3):
        _check_layers(kind, draft, target)
        _check_hidden(draft, target, _hidden_read(kind, draft))
    elif kind == MTP:
        _check_hidden(draft, target, _hidden_out(draft))
        _check_exposes(draft, target, "nextn")
    _check_vocabulary(kind, draft, target)


# ---- hidden size and layers

def _hidden(header: _Header) -> int:
    return header.number("embedding_length")


def _hidden_out(header: _Header) -> int:
    """Width of what the last layer gives to a head."""
    return header.number("embedding_length_out") or _hidden(header)


def _layer_ids(draft: _Header) -> tuple[int, ...]:
    ids = draft.values.get(f"{draft.arch}.target_layers")
    if not isinstance(ids, tuple) or not ids or not all(isinstance(i, int) for i in ids):
        raise DraftError(f"the draft model '{draft.path}' does not say which layers of its target it reads ('{draft.arch}.target_layers'). Convert it again.")
    return ids  # type: ignore[return-value]


def _hidden_read(kind: str, draft: _Header) -> int:
    """Hidden size of the target that a draft was made for: EAGLE-3 names it, DFlash shares it with its own."""
    stated = draft.number("target_hidden_size") if kind == EAGLE3 else _hidden(draft)
    fused = draft.shapes.get("fc.weight")
    if fused is None:
        raise DraftError(f"the draft model '{draft.path}' lacks the tensor 'fc.weight' that joins the target's layers. Download or convert it again.")
    n_layers = len(_layer_ids(draft))
    if fused[0] != n_layers * stated:
        raise DraftError(f"the draft model '{draft.path}' contradicts itself: 'fc.weight' takes {fused[0]} values, but {n_layers} layers of {stated} are {n_layers * stated}. Convert it again.")
    return stated


def _check_hidden(draft: _Header, target: _Header, wanted: int) -> None:
    has = _hidden(target) if draft.arch in ("dflash", "eagle3") else _hidden_out(target)
    if wanted != has:
        raise DraftError(f"the draft model '{draft.path}' was made for a hidden size of {wanted}, the target '{target.path}' has {has}. Give the draft that belongs to this target.")


def _check_layers(kind: str, draft: _Header, target: _Header) -> None:
    n_layer = target.number("block_count") - target.number("nextn_predict_layers")
    for layer in _layer_ids(draft):
        if not 0 <= layer <= n_layer:
            raise DraftError(f"the draft model '{draft.path}' reads layer {layer}, the target '{target.path}' has layers 0 to {n_layer - 1}. Give the draft that belongs to this target.")
        if layer < n_layer:
            _check_exposes(draft, target, "layer_inputs")
        else:  # the output of the last layer
            _check_exposes(draft, target, "nextn" if kind == EAGLE3 else "last_output")


def _check_exposes(draft: _Header, target: _Header, fact: str) -> None:
    what = {
        "layer_inputs": "the layer inputs",
        "last_output": "the output of the last layer",
        "nextn": "the hidden state of the last layer",
    }[fact]
    if target.arch not in _targets()[fact]:
        raise DraftError(
            f"the draft model '{draft.path}' reads {what} of its target, which this llama.cpp does not expose for the "
            f"architecture '{target.arch}' of '{target.path}'. Serve without a draft, or with a plain draft model (a small "
            "language model with the same vocabulary)."
        )


# ---- vocabulary

def _check_vocabulary(kind: str, draft: _Header, target: _Header) -> None:
    ours, theirs = draft.values.get("tokenizer.ggml.tokens"), target.values.get("tokenizer.ggml.tokens")
    if not isinstance(ours, tuple) or not isinstance(theirs, tuple):
        lacking = draft if not isinstance(ours, tuple) else target
        raise DraftError(f"'{lacking.path}' has no vocabulary ('tokenizer.ggml.tokens'), so the pair cannot be checked. Convert it again with its tokenizer.")
    for problem in _vocabulary_problems(kind, draft, target, ours, theirs):
        raise DraftError(f"the draft model '{draft.path}' and the target '{target.path}' have different vocabularies: {problem}. Give a draft with the target's vocabulary.")


def _vocabulary_problems(kind: str, draft: _Header, target: _Header, ours: tuple, theirs: tuple) -> Iterator[str]:
    model = "tokenizer.ggml.model"
    if draft.values.get(model) != target.values.get(model):
        yield f"tokenizer '{draft.values.get(model)}' and '{target.values.get(model)}'"
    if kind == SIMPLE:
        for name in ("bos", "eos"):
            pair = [_special(header, name) for header in (draft, target)]
            if None not in pair and pair[0] != pair[1]:
                yield f"{name} token {pair[0]} and {pair[1]}"
    # a head shares rows with the target's embeddings or logits, so padding is no excuse there
    allowed = _MAX_SIZE_DIFFERENCE if kind == SIMPLE else 0
    if abs(len(ours) - len(theirs)) > allowed:
        yield f"{len(ours)} and {len(theirs)} tokens (a difference of {allowed} is allowed)"
    if ours == theirs:
        return
    ignored = {draft.values.get("tokenizer.ggml.mask_token_id")} if kind != SIMPLE else set()
    types = draft.values.get("tokenizer.ggml.token_type"), target.values.get("tokenizer.ggml.token_type")
    for token in range(_FIRST_COMPARED_TOKEN, min(len(ours), len(theirs))):
        if ours[token] != theirs[token] and token not in ignored and not (kind != SIMPLE and _is_unused(types, token)):
            yield f"token {token} is '{_text(ours[token])}' and '{_text(theirs[token])}'"


def _is_unused(types: tuple, token: int) -> bool:
    return any(isinstance(t, tuple) and token < len(t) and t[token] == _TOKEN_TYPE_UNUSED for t in types)


def _text(token: bytes | object) -> str:
    return token.decode("utf-8", errors="replace") if isinstance(token, bytes) else str(token)


def _special(header: _Header, name: str) -> str | None:
    """Id of a special token and whether the tokenizer adds it; None when the file leaves that to llama.cpp's default."""
    adds, token = (header.values.get(f"tokenizer.ggml.{key}") for key in (f"add_{name}_token", f"{name}_token_id"))
    if adds is None or token is None:
        return None
    return f"{token} (added)" if adds else "not added"
