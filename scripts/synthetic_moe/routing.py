"""Routers whose experts are as unevenly used as those of trained models, and differently by topic.

Token embeddings are a mixture of one common direction, the direction of the token's topic, and noise. A router row
answers to the common direction with the expert's popularity, to the topics with the expert's affinity, and to the noise
with chance. Tokens of topic t are the ids with id * n_topics // n_token == t; padding, the ids from n_token on, has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COMMON, TOPIC, NOISE = 0.55, 0.45, 0.70  # parts of an embedding; squares sum to about one
SPREAD, SPREAD_FOLLOWED = 2.0, 1.0  # of the logits of a topic's tokens; below a follower they must stay behind it
PADDING_LOGIT = -30.0  # of a padding token, where those of tokens are about 8 at most


@dataclass(frozen=True)
class Topics:
    """Directions that embeddings and routers share."""

    common: np.ndarray  # [n_embd], unit
    topics: np.ndarray  # [n_topics, n_embd], unit, orthogonal to each other and to common
    seed: int  # of what is a token's own

    @staticmethod
    def make(rng: np.random.Generator, n_embd: int, n_topics: int) -> "Topics":
        if not 1 <= n_topics < n_embd:
            raise ValueError(f"{n_topics} topics need an embedding longer than {n_embd}")
        basis, _ = np.linalg.qr(rng.standard_normal((n_embd, n_topics + 1)))
        return Topics(basis[:, 0].astype(np.float32), basis[:, 1:].T.astype(np.float32), int(rng.integers(2**32)))

    def of_tokens(self, tokens: np.ndarray, n_token: int) -> np.ndarray:
        """int[n]: topic of each token id."""
        return tokens.astype(np.int64) * len(self.topics) // n_token

    def own(self, n_token: int) -> np.ndarray:
        """float32[n_token, n_embd]: what is each token's own in its embedding, unit root mean square."""
        return np.random.default_rng(self.seed).standard_normal((n_token, len(self.common)), dtype=np.float32)

    def rows(self, n_token: int, n_padding: int, common: float, topic: float, common_padding: float) -> np.ndarray:
        """float32[n_token + n_padding, n_embd]: every row so much of the common direction and of its token's topic."""
        of = self.of_tokens(np.arange(n_token), n_token)
        padding = np.broadcast_to(common_padding * self.common, (n_padding, len(self.common)))
        return np.vstack([common * self.common + topic * self.topics[of], padding]).astype(np.float32)


def embeddings(rng: np.random.Generator, topics: Topics, n_token: int, n_padding: int = 0) -> np.ndarray:
    """float32[n_token + n_padding, n_embd] of unit root mean square."""
    size = len(topics.common) ** 0.5
    rows = topics.rows(n_token, n_padding, size * COMMON, size * TOPIC, size * COMMON)
    rows[:n_token] += NOISE * topics.own(n_token)
    rows[n_token:] += NOISE * rng.standard_normal((n_padding, len(topics.common)), dtype=np.float32)
    return rows


def previous_tokens(rng: np.random.Generator, of: np.ndarray) -> np.ndarray:
    """int[n]: the token before each, so that the tokens of a topic (of: int[n]) are one ring in random order."""
    before = np.arange(len(of))
    for topic in np.unique(of):
        ring = rng.permutation(np.flatnonzero(of == topic))
        before[ring] = np.roll(ring, 1)
    return before


def output_head(
    rng: np.random.Generator, topics: Topics, n_token: int, n_padding: int = 0, topic_tokens: float = 20,
    follow: float = 0.0, n_control: int = 0,
) -> np.ndarray:  # fmt: skip
    """float32[n_token + n_padding, n_embd]: text sampled at temperature 1 stays on the topic of its prompt for
    `topic_tokens` tokens on average, and padding is next to impossible.

    follow: logit of the one token that follows each in its topic's ring, above the others'. 0: there is none, and greedy
    text repeats a few tokens soon. Large: it goes through its whole topic. The first n_control tokens are not in a ring
    and as good as padding then: nothing ends such a text.
    """
    n_embd, n_others = len(topics.common), max(len(topics.topics) - 1, 1)
    spread = SPREAD_FOLLOWED if follow else SPREAD
    per_topic = n_token / len(topics.topics) * np.exp(spread**2 / 2)
    leaving = n_others * per_topic / (per_topic + (np.exp(follow) if follow else 0.0))  # over staying, at equal logits
    on_topic = np.log(leaving * (topic_tokens - 1))  # logit of a token of the topic above that of others
    noise = rng.standard_normal((n_token + n_padding, n_embd), dtype=np.float32)
    size = n_embd**0.5
    rows = topics.rows(n_token, n_padding, 0.0, on_topic / (TOPIC * size), PADDING_LOGIT / (COMMON * size))
    rows += np.float32(spread / size) * noise
    if follow:
        before = n_control + previous_tokens(rng, topics.of_tokens(np.arange(n_control, n_token), n_token))
        rows[n_control:n_token] += np.float32(follow / (NOISE * n_embd)) * topics.own(n_token)[before]
        rows[:n_control] += np.float32(PADDING_LOGIT / (COMMON * size)) * topics.common
    return rows


def topic_prompt(topic: int, n: int, *, n_topics: int, n_token: int, first: int = 0, seed: int = 0) -> list[int]:
    """n random token ids of a topic, none below `first`, where control tokens are. ValueError: there is no such topic."""
    if not 0 <= topic < n_topics:
        raise ValueError(f"there is no topic {topic}; the model has 0 to {n_topics - 1}")
    low, high = -(-topic * n_token // n_topics), -(-(topic + 1) * n_token // n_topics)
    if max(low, first) >= high:
        raise ValueError(f"topic {topic} has control tokens only")
    return [int(t) for t in np.random.default_rng([seed, topic]).integers(max(low, first), high, n)]


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


@dataclass(frozen=True)
class RouterSample:
    """What eight routers of these numbers answer to 2,048 tokens of all topics, for any skew; the seed is fixed. A single
    router of few experts may be some percent off the mean."""

    n_used: int
    answers: list[tuple[np.ndarray, np.ndarray]]  # of each router [n_token, n_expert]: without skew, and what each unit adds

    @staticmethod
    def make(n_embd: int, n_expert: int, n_used: int, n_topics: int, affinity: float) -> "RouterSample":
        rng = np.random.default_rng(1)
        topics = Topics.make(rng, n_embd, n_topics)
        tokens = embeddings(rng, topics, 2048)
        answers = []
        for seed in range(8):
            flat, one = (router(np.random.default_rng([1, seed]), topics, n_expert, skew, affinity) for skew in (0.0, 1.0))
            answers.append((tokens @ flat.T, tokens @ (one - flat).T))
        return RouterSample(n_used, answers)

    def share(self, skew: float) -> float:
        """Mean hot_share of the routers' selections."""
        shares = []
        for flat, per_skew in self.answers:
            selected = np.argpartition(-(flat + np.float32(skew) * per_skew), self.n_used - 1, axis=1)[:, : self.n_used]
            shares.append(hot_share(np.bincount(selected.ravel(), minlength=flat.shape[1])))
        return float(np.mean(shares))


def skew_for_share(share: float, n_embd: int, n_expert: int, n_used: int, n_topics: int, affinity: float) -> float:
    """The skew at which the hottest 60 % of the experts take `share` of the routing; ValueError when none does."""
    sample = RouterSample.make(n_embd, n_expert, n_used, n_topics, affinity)
    low, high = 0.0, 40.0
    if not sample.share(low) <= share <= sample.share(high):
        raise ValueError(f"no router of {n_expert} experts with {n_used} used gives the hottest 60 % a share of {share}")
    for _ in range(12):  # to a hundredth
        middle = (low + high) / 2
        if sample.share(middle) < share:
            low = middle
        else:
            high = middle
    return high
