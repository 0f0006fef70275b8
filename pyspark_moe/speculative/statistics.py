"""What a step gave and cost, and the sums over all steps."""
from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Step:
    """One step: tokens, and where its time went. Times are milliseconds since the step was begun.

    tokens       what was kept, in order
    n_drafted    tokens that the draft had proposed
    n_accepted   of these, how many are in `tokens`
    draft_ms     the draft model, its heads included
    heads_ms     of draft_ms: what the heads took, with choosing the drafted tokens; None unless Speculation(measure_heads=True)
    verify_ms    the target's batch
    features_ms  handing the target's inner activations to the draft
    sampling_ms  choosing tokens and comparing them with the draft
    other_ms     the rest, the caller's own time between the calls included
    """

    tokens: tuple[int, ...]
    n_drafted: int
    n_accepted: int
    draft_ms: float
    heads_ms: float | None
    verify_ms: float
    features_ms: float
    sampling_ms: float
    other_ms: float

    @property
    def total_ms(self) -> float:
        """The whole step."""
        return self.draft_ms + self.verify_ms + self.features_ms + self.sampling_ms + self.other_ms


@dataclass(frozen=True)
class SpeculationStats:
    """Sums over the steps in which a draft was verified, since the draft was opened.

    n_steps, n_drafted, n_accepted   steps, tokens proposed, tokens of these kept
    n_pauses                         how often drafting rested for 256 tokens, because hardly anything was accepted
    is_broken                        the draft computes logits that are not numbers, and is not asked any more
    is_exact                         verified tokens are rounded as single ones, so that greedy text is the text without a draft
    draft_ms ... other_ms            as in Step. A SparkLlama with a draft samples by itself: its sampling_ms is 0, the time in other_ms
    drafted_at, accepted_at          [depth]: drafts longer than `depth`, and those of which more than `depth` tokens were kept
    """

    n_steps: int
    n_drafted: int
    n_accepted: int
    n_pauses: int
    is_broken: bool
    is_exact: bool
    draft_ms: float
    heads_ms: float | None
    verify_ms: float
    features_ms: float
    sampling_ms: float
    other_ms: float
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens that a step with a draft wrote, the target's own one included; None before the first."""
        return 1 + self.n_accepted / self.n_steps if self.n_steps else None

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """Share of the drafts that long whose token at each depth was kept, 0 to 1; the first token has depth 0."""
        return tuple(accepted / drafted for accepted, drafted in zip(self.accepted_at, self.drafted_at))

    @property
    def total_ms(self) -> float:
        """All of these steps."""
        return self.draft_ms + self.verify_ms + self.features_ms + self.sampling_ms + self.other_ms

    def as_dict(self) -> dict[str, object]:
        """For JSON; with tokens_per_step and acceptance_by_depth."""
        return {**asdict(self), "tokens_per_step": self.tokens_per_step, "acceptance_by_depth": self.acceptance_by_depth}

    def __str__(self) -> str:
        if not self.n_steps:
            return "no draft was verified"
        times = ", ".join(f"{name} {getattr(self, f'{name}_ms') / self.n_steps:.2f}" for name in ("draft", "verify", "features", "sampling", "other"))
        if self.heads_ms is not None:
            times = times.replace(",", f" (its heads {self.heads_ms / self.n_steps:.2f}),", 1)
        depths = " ".join(f"{share:.0%}" for share in self.acceptance_by_depth)
        return f"{self.tokens_per_step:.2f} tokens a step over {self.n_steps} steps; ms a step: {times}; accepted by depth: {depths}"
