"""Drafting for scripts: a small language model that proposes tokens for a larger one with the same vocabulary.

llama-cpp-python drives drafts through its LlamaDraftModel interface, which sees token ids and nothing else. That is
enough for plain drafts. DFlash, DSpark, EAGLE-3 and MTP drafts compute from the target's inner activations, which
that interface does not offer; `dflash_server --draft` drives them.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import draft
from ._native import prepare_llama_cpp
from .errors import ConfigError, DraftError

llama_cpp = prepare_llama_cpp()

from llama_cpp.llama_speculative import LlamaDraftModel  # noqa: E402  (needs the libraries chosen above)


class PlainDraft(LlamaDraftModel):
    """Proposes what a small model would write next, greedily.

    model_path   the draft model; n_ctx: its context in tokens; n_draft: tokens per proposal, 1 or more (default 4)
    Not thread safe, as the Llama that uses it is not. close() may be called any number of times.
    Raises ConfigError, and ValueError when the model cannot be loaded.
    """

    def __init__(self, model_path: str | Path, *, n_ctx: int, n_draft: int = 4, n_threads: int | None = None, verbose: bool = False) -> None:
        if n_draft < 1:
            raise ConfigError(f"draft_tokens is {n_draft}: propose 1 token or more at a time.")
        self.n_draft = n_draft
        self._llm = llama_cpp.Llama(str(model_path), n_ctx=n_ctx, n_threads=n_threads, verbose=verbose)

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: object) -> npt.NDArray[np.intc]:
        """int32 [0..n_draft]: tokens to follow `input_ids`; fewer at an end of text or at the end of the context."""
        llm, ids = self._llm, input_ids.tolist()
        n_ctx = llm.n_ctx()
        if not ids or len(ids) >= n_ctx:
            return np.empty(0, dtype=np.intc)
        # keep what the draft has decoded already, but decode the last token again: its logits are wanted
        kept = min(llm.longest_token_prefix(llm._input_ids, ids), len(ids) - 1)
        if not llm._ctx.kv_cache_seq_rm(-1, kept, -1):  # a recurrent state cannot be cut back
            llm.reset()
            kept = 0
        llm.n_tokens = kept
        llm.eval(ids[kept:])
        vocab = llama_cpp.llama_model_get_vocab(llm.model)
        proposed: list[int] = []
        while True:
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),))
            token = int(np.argmax(logits))
            proposed.append(token)
            if len(proposed) >= self.n_draft or llm.n_tokens >= n_ctx or llama_cpp.llama_vocab_is_eog(vocab, token):
                return np.asarray(proposed, dtype=np.intc)
            llm.eval([token])

    def close(self) -> None:
        """Frees the draft model."""
        self._llm.close()


def open_draft(draft_path: str | Path, target_path: str | Path, *, n_ctx: int, n_draft: int, n_threads: int | None, verbose: bool) -> PlainDraft:
    """A draft for `target_path`, checked against it. Raises DraftError, also for kinds that only the server drives."""
    arguments = draft.resolve(draft_path, target_path)
    kind = arguments[arguments.index("--spec-type") + 1]
    if kind != draft.SIMPLE:
        raise DraftError(
            f"'{draft_path}' is a {kind.removeprefix('draft-')} draft: it reads the target's inner activations, which llama-cpp-python "
            f"{llama_cpp.__version__} does not offer to scripts. Use `dflash_server MODEL --draft {draft_path}` and talk to it over HTTP, or give "
            "SparkLlama a plain draft (a small language model with the same vocabulary), or draft_model=LlamaPromptLookupDecoding()."
        )
    return PlainDraft(draft_path, n_ctx=n_ctx, n_draft=n_draft, n_threads=n_threads, verbose=verbose)
