"""Speculative decoding step by step: a draft model proposes tokens, the target computes them together, and what it agrees with is kept.

    with SparkLlama(target, n_ctx=2048) as llm, Speculation(llm, draft) as spec:
        text = [spec.begin(llm.tokenize(b"def add(a, b):\\n"))]
        while len(text) < 100:
            step = spec.step()              # or spec.draft(), spec.verify(), spec.accept() one by one
            text += step.tokens
        print(llm.detokenize(text).decode(), spec.stats())

Drafting and sampling are llama.cpp's own (common/speculative), in the kinds that `dflash_server --draft` takes. With exact_verify
(the default) greedy text is the text without a draft, on backends that can round tokens of a batch as single ones.
"""
from __future__ import annotations

from .sampling import Sampling
from .speculation import Speculation
from .statistics import SpeculationStats, Step

__all__ = ["Sampling", "Speculation", "SpeculationStats", "Step"]
