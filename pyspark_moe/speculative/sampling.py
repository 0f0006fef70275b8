"""How the target's tokens are chosen."""
from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError

_RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's LLAMA_DEFAULT_SEED: a new one each time


@dataclass(frozen=True)
class Sampling:
    """llama.cpp's samplers, in its order. The default is greedy.

    temperature        0 (default): always the likeliest token
    seed               of the random numbers, 0 to 2**32 - 2; None (default): a new one each time
    top_k              only the k likeliest tokens; 0 (default): all
    top_p, min_p       the likeliest tokens with this probability together, tokens with at least this share of the likeliest one's
                       probability; 0 to 1; defaults 1 and 0: off
    penalty_last_n     how many of the last tokens the penalties look at; default 64
    penalty_repeat     divides the logits of these; default 1: off. penalty_frequency, penalty_presence: OpenAI's; default 0: off
    grammar            GBNF that the text must follow; default "": none

    Raises ConfigError.
    """

    temperature: float = 0.0
    seed: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty_last_n: int = 64
    penalty_repeat: float = 1.0
    penalty_frequency: float = 0.0
    penalty_presence: float = 0.0
    grammar: str = ""

    def __post_init__(self) -> None:
        self._require("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a number, 0 or more")
        self._require("seed", self.seed is None or 0 <= self.seed < _RANDOM_SEED, "0 to 4294967294, or None")
        self._require("top_k", 0 <= self.top_k < 2**31, "0 (all) or more")
        self._require("top_p", 0 <= self.top_p <= 1, "0 to 1")
        self._require("min_p", 0 <= self.min_p <= 1, "0 to 1")
        self._require("penalty_last_n", 0 <= self.penalty_last_n < 2**31, "0 (none) or more")
        self._require("penalty_repeat", math.isfinite(self.penalty_repeat) and self.penalty_repeat > 0, "a number above 0; 1 is off")
        for name in ("penalty_frequency", "penalty_presence"):
            self._require(name, math.isfinite(getattr(self, name)), "a number; 0 is off")

    def _require(self, name: str, condition: bool, wanted: str) -> None:
        if not condition:
            raise ConfigError(f"{name} is {getattr(self, name)!r}: give {wanted}.")

    @property
    def native_seed(self) -> int:
        """The seed as llama.cpp takes it."""
        return _RANDOM_SEED if self.seed is None else self.seed
