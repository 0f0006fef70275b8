"""The draft of a SparkLlama: llama_cpp's loop samples, libspark_moe drafts and computes.

llama_cpp asks a draft for tokens, evaluates them with the last token of the text, and samples row by row until a sample is not what
the draft proposed. So eval() goes through the speculation, which hands the target's activations to the draft and rounds verified
rows as single ones. How many tokens were kept is known from the row that was sampled last, and a text that ends leaves the memory as
it would be without a draft: what the next prompt finds there decides in which batches it is computed, and so how it is rounded.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._native import prepare_llama_cpp
from .handle import Handle
from .statistics import SpeculationStats

prepare_llama_cpp()

from llama_cpp.llama_speculative import LlamaDraftModel  # noqa: E402  (needs the libraries chosen above)


class LlamaDraft(LlamaDraftModel):
    """A draft model of any kind that `dflash_server --draft` takes. One thread, as the Llama that uses it.

    llm   the loaded target, whose eval(), sample(), generate() and load_state() call this object. The others: as in Handle
    """

    def __init__(self, llm: Any, arguments: list[str], *, n_draft: int, n_gpu_layers: int, exact_verify: bool) -> None:
        self._handle = Handle(llm, arguments, n_draft=n_draft, n_gpu_layers=n_gpu_layers, exact_verify=exact_verify)
        self._rows: list[int] = []  # the last token and the tokens proposed after it
        self._pos = 0  # of the first of these
        self._sampled = -1  # the position that was sampled last

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: object) -> npt.NDArray[np.intc]:
        """int32 [0..n_draft]: tokens to follow `input_ids`; none while drafting rests, and near the end of the context."""
        ids = input_ids.tolist()
        pos = len(ids) - 1
        self._settle()
        proposed: list[int] = []
        if pos <= self._handle.n_past:  # else there are more tokens that are not computed: a caller of generate() has sent some
            proposed = self._handle.propose(ids[-1], pos)
            self._rows, self._pos = [ids[-1], *proposed], pos
        return np.asarray(proposed, dtype=np.intc)

    def eval(self, llm: Any, tokens: list[int]) -> None:
        """What Llama.eval() does. Raises InternalError when llama.cpp cannot compute, InvalidArgumentError past the context."""
        if llm.n_tokens > self._handle.n_past:
            self.adopt(llm)
        for i in range(0, len(tokens), llm.n_batch):
            rows = list(tokens[i : i + llm.n_batch])
            pos, end = llm.n_tokens, llm.n_tokens + len(rows)
            is_verify = len(rows) > 1 and (pos, rows) == (self._pos, self._rows)
            if not is_verify:
                self._rows = []
            self._sampled = -1
            self._handle.decode(rows, pos, "verify" if is_verify else "all" if llm._logits_all else "last")
            llm.input_ids[pos:end] = rows
            if llm._logits_all:
                llm.scores[pos:end] = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(len(rows), llm._n_vocab))
            llm.n_tokens = end
            llm._requires_eval = False

    def adopt(self, llm: Any) -> None:
        """The memory of the context was filled with the text of `llm` by something else: the draft begins anew behind it."""
        self._rows = []
        self._handle.adopt(llm.input_ids[: llm.n_tokens].tolist())

    def sampled(self, pos: int | None) -> None:
        """A token was sampled after the one at position `pos`; None: after the last one."""
        self._sampled = self._handle.n_past - 1 if pos is None else pos

    def end_text(self, llm: Any) -> None:
        """Nobody wants more of this text: drafted tokens that were computed and not reached are no part of it."""
        end = self._sampled + 1
        self._settle()
        if 0 < end < llm.n_tokens:
            llm.n_tokens = end
            llm._ctx.kv_cache_seq_rm(-1, end, -1)
            llm._requires_eval = True  # the logits that are there belong to the last of those tokens

    def stats(self) -> SpeculationStats:
        """Sums over all steps with a draft."""
        return self._handle.stats()

    def close(self) -> None:
        """Frees the draft; again is allowed."""
        self._handle.close()

    def _settle(self) -> None:
        """Says how much of the last proposal was kept: the tokens up to the one that was sampled from last."""
        rows, self._rows = self._rows, []
        if len(rows) > 1 and self._pos <= self._sampled < self._pos + len(rows):
            self._handle.keep(self._sampled - self._pos)
