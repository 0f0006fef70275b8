"""Routers whose experts are as unevenly used as those of trained models, and differently by topic.

Token embeddings are a mixture of one common direction, the direction of the token's topic, and noise. A router row
answers to the common direction with the expert's popularity, to the topics with the expert's affinity, and to the noise
with chance. Tokens of topic t are the ids with id * n_topics // n_vocab == t.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COMMON, TOPIC, NOISE = 0.55, 0.45, 0.70  # parts of an embedding; squares sum to about one


@dataclass(frozen=True)
class Topics:
    """Directions that embeddings and routers share."""

    common: np.ndarray  # [n_embd], unit
    topics: np.ndarray  # [n_topics, n_embd], unit, orthogonal to each other and to common

    @staticmethod
    def make(rng: np.random.Generator, n_embd: int, n_topics: int) -> "Topics":
        if not 1 <= n_topics < n_embd:
            raise ValueError(f"{n_topics} topics need an embedding longer than {n_embd}")
        basis, _ = np.linalg.qr(rng.standard_normal((n_embd, n_topics + 1)))
        return Topics(basis[:, 0].astype(np.float32), basis[:, 1:].T.astype(np.float32))

    def of_tokens(self, tokens: np.ndarray, n_vocab: int) -> np.ndarray:
        """int[n]: topic of each token id."""
        return tokens.astype(np.int64) * len(self.topics) // n_vocab


def embeddings(rng: np.random.Generator, topics: Topics, n_vocab: int) -> np.ndarray:
    """float32[n_vocab, n_embd] of unit root mean square."""
    n_embd = len(topics.common)
    of = topics.of_tokens(np.arange(n_vocab), n_vocab)
    noise = rng.standard_normal((n_vocab, n_embd), dtype=np.float32)
    return np.sqrt(n_embd, dtype=np.float32) * (COMMON * topics.common + TOPIC * topics.topics[of]) + NOISE * noise


def output_head(rng: np.random.Generator, topics: Topics, n_vocab: int) -> np.ndarray:
    """float32[n_vocab, n_embd]: sampled text stays on the topic of its prompt."""
    n_embd = len(topics.common)
    of = topics.of_tokens(np.arange(n_vocab), n_vocab)
    noise = rng.standard_normal((n_vocab, n_embd), dtype=np.float32)
    return (4.0 / (TOPIC * np.sqrt(n_embd)) * topics.topics[of] + 2.0 / np.sqrt(n_embd) * noise).astype(np.float32)


def router(rng: np.random.Generator, topics: Topics, n_expert: int, skew: float, affinity: float) -> np.ndarray:
    """float32[n_expert, n_embd]. skew: log popularity of the hottest over the coldest expert; 0 is flat.
    affinity: spread of an expert's preference between topics, in the same unit."""
    n_embd = len(topics.common)
    popularity = -skew * rng.permutation(n_expert) / max(n_expert - 1, 1)
    preference = affinity * rng.standard_normal((n_expert, len(topics.topics)))
    noise = rng.standard_normal((n_expert, n_embd))
    shared = np.vstack([topics.common, topics.topics])
    noise -= (noise @ shared.T) @ shared  # chance alone must not make an expert popular
    common = np.outer(popularity / (COMMON * np.sqrt(n_embd)), topics.common)
    topical = (preference / (TOPIC * np.sqrt(n_embd))) @ topics.topics
    return (common + topical + noise / np.sqrt(n_embd)).astype(np.float32)


def hot_share(uses: np.ndarray, hot: float = 0.6) -> float:
    """Share of the uses that the hottest `hot` of the experts take."""
    ordered = np.sort(np.asarray(uses, np.float64))[::-1]
    return float(ordered[: int(round(hot * len(ordered)))].sum() / max(ordered.sum(), 1.0))


def expected_share(n_embd: int, n_expert: int, n_used: int, n_topics: int, skew: float, affinity: float) -> float:
    """hot_share of a router made with these numbers, on tokens of all topics; the seed is fixed."""
    rng = np.random.default_rng(1)
    topics = Topics.make(rng, n_embd, n_topics)
    tokens = embeddings(rng, topics, 2048)
    weights = router(rng, topics, n_expert, skew, affinity)
    selected = np.argpartition(-(tokens @ weights.T), n_used - 1, axis=1)[:, :n_used]
    return hot_share(np.bincount(selected.ravel(), minlength=n_expert))


def skew_for_share(share: float, n_embd: int, n_expert: int, n_used: int, n_topics: int, affinity: float) -> float:
    """The skew at which the hottest 60 % of the experts take `share` of the routing; ValueError when none does."""
    low, high = 0.0, 40.0
    if not expected_share(n_embd, n_expert, n_used, n_topics, low, affinity) <= share <= expected_share(
        n_embd, n_expert, n_used, n_topics, high, affinity
    ):
        raise ValueError(f"no router of {n_expert} experts with {n_used} used gives the hottest 60 % a share of {share}")
    for _ in range(20):
        middle = (low + high) / 2
        if expected_share(n_embd, n_expert, n_used, n_topics, middle, affinity) < share:
            low = middle
        else:
            high = middle
    return high
