"""How drafting is done: one frozen dataclass, filled once from flags, whatever the kind of draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftConfig:
    """exact_verify   tokens verified together are rounded as single ones, so that greedy text is the text without a draft, up to
                   64 tokens at a time; slower steps. Default True.
    """

    exact_verify: bool = True

    def as_args(self) -> list[str]:
        """The flags that say the same, for the children of a router."""
        return [] if self.exact_verify else ["--no-exact-verify"]
