"""Routing of synthetic models without the models: large shapes, long texts, in seconds.

As in the models themselves, a token's embedding has a common part, one of its topic and one of its own, and each layer's
router answers to it. What attention and experts would add is left out, so every layer sees the embedding: a token selects
the same experts wherever it stands, and drift comes from topics alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pyspark_moe.routing_trace import Routing

from .routing import Topics, embeddings, router, skew_for_share


@dataclass(frozen=True)
class Routers:
    """selected: int16 [n_layer, n_token, n_used], the experts of every token of the vocabulary in every layer."""

    selected: np.ndarray
    n_expert: int
    n_topics: int

    @staticmethod
    def make(
        *, n_layer: int = 40, n_expert: int = 256, n_used: int = 8, n_topics: int = 64, affinity: float = 0.6, hot_share: float = 0.93,
        layer_skew: tuple[float, float] = (1.0, 1.0), n_token: int = 8192, n_embd: int = 256, seed: int = 0,
    ) -> Routers:  # fmt: skip
        """hot_share: of the routing, for the hottest 60 % of the experts; affinity: how differently topics use experts.
        layer_skew: factors of the popularity's skew in the first and in the last layer, others in between."""
        skew = skew_for_share(hot_share, n_embd, n_expert, n_used, n_topics, affinity)
        topics = Topics.make(np.random.default_rng([seed, 0]), n_embd, n_topics)
        tokens = embeddings(np.random.default_rng([seed, 1]), topics, n_token)
        selected = np.empty((n_layer, n_token, n_used), dtype=np.int16)
        for layer, factor in enumerate(np.linspace(*layer_skew, n_layer)):
            weight = router(np.random.default_rng([seed, 2, layer]), topics, n_expert, skew * factor, affinity)
            selected[layer] = np.argpartition(-(tokens @ weight.T), n_used - 1, axis=1)[:, :n_used]
        return Routers(selected, n_expert, n_topics)

    def topics_of_text(self, n: int, topic_tokens: float, seed: int) -> np.ndarray:
        """int [n]: topic of each token of a text that stays on a topic for `topic_tokens` on average."""
        rng = np.random.default_rng([seed, 3])
        changes = rng.random(n) < 1 / topic_tokens
        return rng.integers(0, self.n_topics, n)[np.maximum.accumulate(np.where(changes, np.arange(n), 0))]

    def route(self, topics: np.ndarray, seed: int, step: int = 1) -> Routing:
        """Routing of random tokens of these topics, `step` at a time."""
        n_token = self.selected.shape[1]
        low = -(-topics * n_token // self.n_topics)
        high = -(-(topics + 1) * n_token // self.n_topics)
        tokens = np.random.default_rng([seed, 4]).integers(low, high)
        experts = self.selected[:, tokens].transpose(1, 0, 2)
        steps = np.append(np.arange(0, len(tokens), step, dtype=np.int64), len(tokens))
        return Routing(np.ascontiguousarray(experts), steps, (self.n_expert,) * len(self.selected))
