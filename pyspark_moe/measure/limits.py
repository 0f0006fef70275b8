"""How long a measurement may take: in all, and without a sign of life."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import ConfigError, StalledError


@dataclass
class Limits:
    """Time-outs that every step of a measurement is under. Begins when it is made.

    timeout_s  for all of it, seconds; None (default): as long as it takes
    stall_s    for one step without a sign of life, seconds; default 600

    Raises ConfigError for what is no time.
    """

    timeout_s: float | None = None
    stall_s: float = 600.0
    clock: Callable[[], float] = time.monotonic
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        for flag, value in (("--timeout", self.timeout_s), ("--stall", self.stall_s)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{flag} is {value:g}: give seconds, more than 0.")
        self._begin = self.clock()

    @property
    def left_s(self) -> float:
        """Until the end of the time for all of it; negative after it."""
        return math.inf if self.timeout_s is None else self.timeout_s - (self.clock() - self._begin)

    def step_s(self, since: float) -> float:
        """What a step may still take that gave its last sign of life at `since`, by `clock`."""
        return min(self.left_s, self.stall_s - (self.clock() - since))

    def stalled(self, who: str) -> StalledError:
        """The error for a step that has used its time up."""
        if self.left_s <= 0:
            return StalledError(f"The time is up: --timeout {self.timeout_s:g} s ended while {who} was at work.")
        return StalledError(f"{who} gave no sign of life for {self.stall_s:g} s and was ended: a slow disk or machine may need a larger --stall.")
