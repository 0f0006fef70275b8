"""How many of a layer's experts a guess contains, and the guesses that need no training. Pure numpy."""

from __future__ import annotations

import hashlib

import numpy as np

RECALL_AT = (8, 16, 24)


def recall_at(scores: np.ndarray, selected: np.ndarray, k: int) -> float:
    """Share of the selected experts int [n_tokens, n_used] that are among the k of the highest scores [n_tokens, n_expert]."""
    if not len(selected):
        return float("nan")
    k = min(k, scores.shape[1])
    guessed = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(guessed, np.argpartition(-scores, k - 1, axis=1)[:, :k], True, axis=1)
    return float(np.take_along_axis(guessed, selected.astype(np.int64), axis=1).mean())


def recalls(scores: np.ndarray, selected: np.ndarray) -> dict[str, float]:
    """recall@8, @16 and @24."""
    return {f"recall@{k}": round(recall_at(scores, selected, k), 5) for k in RECALL_AT}


def recency_scores(selected: np.ndarray, n_expert: int) -> np.ndarray:
    """The temporal guess, float32 [n_tokens, n_expert]: experts by how lately the tokens before used them. The first n_used
    are those of the last token, in the order of their rank there."""
    n_tokens, n_used = selected.shape
    last = np.full(n_expert, -1.0)
    result = np.empty((n_tokens, n_expert), dtype=np.float32)
    rank = 1 - np.arange(1, n_used + 1) / (n_used + 1)
    for t in range(n_tokens):
        result[t] = last - t
        last[selected[t]] = t + rank
    return result


def is_held_out(n_tokens: int, test_fraction: float, seed: int, block: int = 256) -> np.ndarray:
    """bool [n_tokens]: which tokens are kept from training, in whole blocks, since neighbours are alike. The same seed
    always chooses the same blocks; of two blocks or more, at least one is on either side."""
    n_blocks = -(-n_tokens // block)
    order = sorted(range(n_blocks), key=lambda b: hashlib.sha256(f"{seed} {b}".encode()).digest())
    n_test = min(max(1, round(test_fraction * n_blocks)), max(0, n_blocks - 1))
    chosen = np.zeros(n_blocks, dtype=bool)
    chosen[order[:n_test]] = True
    return np.repeat(chosen, block)[:n_tokens]
