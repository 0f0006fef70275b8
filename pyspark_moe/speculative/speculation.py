"""Speculation: one text, written step by step by a target and its draft."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import StateError
from .handle import Handle, resolve
from .sampling import Sampling
from .statistics import SpeculationStats, Step

if TYPE_CHECKING:
    from llama_cpp import Llama


class Speculation:
    """A draft model for a loaded target, and the text they write: begin(), then draft(), verify() and accept() for each step.

    llm           the target: a llama_cpp.Llama or SparkLlama without a draft of its own and without embedding=True. Its memory belongs
                  to the text until the next call of `llm`, which then reads its prompt anew
    draft         the draft's file, of any kind that `dflash_server --draft` takes; None: the next-token (MTP) head in the target's file
    n_draft       tokens to draft at a time; default 4. A draft with a block of fixed size may give fewer
    n_gpu_layers  of the draft; default: as the target's
    exact_verify  round tokens that are verified together as single ones, so that greedy text is the text without a draft; default True
    measure_heads time the draft's heads apart from its backbone (Step.heads_ms); its graph is then computed in two parts. For DFlash and
                  DSpark drafts, which are one pass; default False

    A text is a prompt and what was kept of each step. Its last token is known and not computed yet. One thread at a time.
    close(), or `with`; again is allowed, and so is closing the target first. Not closed: freed with this object.

    Raises DraftError (the pair does not fit), ConfigError, StateError (the target has a draft), InvalidArgumentError (the target's
    memory is recurrent, n_draft is too large, or there are no heads to measure), ModelLoadError, OutOfMemoryError.
    """

    def __init__(
        self,
        llm: Llama,
        draft: str | os.PathLike[str] | None = None,
        *,
        n_draft: int = 4,
        n_gpu_layers: int | None = None,
        exact_verify: bool = True,
        measure_heads: bool = False,
    ) -> None:
        self._handle: Handle | None = None
        self._has_text = False
        self._written: list[int] = []
        if llm.draft_model is not None:
            raise StateError("This model has a draft of its own (draft= or draft_model=): load it without.")
        arguments = resolve(draft, llm.model_path)
        if n_gpu_layers is None:
            n_gpu_layers = llm.model_params.n_gpu_layers
        self._handle = Handle(llm, arguments, n_draft=n_draft, n_gpu_layers=n_gpu_layers, exact_verify=exact_verify, measure_heads=measure_heads)
        self._llm = llm  # keeps the target alive

    @property
    def n_draft(self) -> int:
        """Tokens to draft at a time."""
        return self._open().n_draft

    @property
    def n_past(self) -> int:
        """Tokens of the text that are computed: all but the last."""
        return self._open().n_past

    def begin(self, prompt: Sequence[int], sampling: Sampling | None = None) -> int:
        """Begins a text with `prompt`, 1 token or more and fewer than the context; its first token after it. sampling: default greedy.

        Raises InvalidArgumentError (what is wrong with a token, the length, or the grammar), InternalError when llama.cpp cannot compute;
        there is no text then.
        """
        handle = self._open()
        self._has_text = False
        self._llm.reset()  # what it remembers of its memory is over, also if this fails half way
        token = handle.begin(prompt, sampling or Sampling())
        self._has_text = True
        return token

    def draft(self, n_max: int | None = None) -> list[int]:
        """Tokens that may follow the text, 0 to n_max (default n_draft): none where drafting rests, and near the end of the context.

        Raises StateError before begin(), inside a step, and when `llm` was used since begin().
        """
        handle = self._open_text()
        return handle.draft(handle.n_draft if n_max is None else n_max)

    def verify(self, drafted: Sequence[int]) -> list[int]:
        """What the target writes: the drafted tokens it agrees with, and one more; an end of generation ends them. 1 to len(drafted) + 1.

        Any tokens may be given, whoever proposed them. Raises StateError (as draft(), or the context is full), InvalidArgumentError.
        """
        self._written = self._open_text().verify(drafted)
        return list(self._written)

    def accept(self, n_keep: int | None = None) -> Step:
        """Ends the step: the first n_keep tokens that verify() gave (default: all) are the text's. 0: as if there had been no step.

        Raises StateError where nothing was verified, InvalidArgumentError for more tokens than there are.
        """
        return self._open_text().accept(self._written, len(self._written) if n_keep is None else n_keep)

    def step(self) -> Step:
        """draft(), verify() and accept() of everything."""
        self.verify(self.draft())
        return self.accept()

    def stats(self) -> SpeculationStats:
        """Sums over all steps with a draft, of every text since this object was made."""
        return self._open().stats()

    def close(self) -> None:
        """Frees the draft; the target stays."""
        if self._handle is not None:
            self._handle.close()

    def _open(self) -> Handle:
        if self._handle is None:
            raise StateError("The draft is closed, or its model is.")
        return self._handle

    def _open_text(self) -> Handle:
        handle = self._open()
        if not self._has_text:
            raise StateError("There is no text to continue: begin a text first.")
        if self._llm.n_tokens > 0:  # begin() puts it to 0
            raise StateError("The target was used for something else, which has taken the memory of the text: begin a new one.")
        return handle

    def __enter__(self) -> Speculation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
