"""How drafting is done: one frozen dataclass, filled once from flags, whatever the kind of draft."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError

AUTO = "auto"
MOST_WIDTH = 63  # verified with the token before them, 64 at a time at most: patches/0110
# Tokens drafted where nobody says how many: llama.cpp's own default.
USUAL_WIDTH = 3
_ALL = 2**31 - 1


@dataclass(frozen=True)
class DraftConfig:
    """exact_verify  tokens verified together are rounded as single ones, so that greedy text is the text without a draft, up to
                  64 tokens at a time; slower steps. Default True.
    verify_width  drafted tokens of a sequence that are verified at once, 1 to 63; "auto": as many as pay, by what steps cost on
                  this machine and how many of the sequence's are accepted. None, the default: "auto" with `--draft` where that
                  cannot change the text, otherwise all that are drafted.

    Raises ConfigError for another width.
    """

    exact_verify: bool = True
    verify_width: int | str | None = None

    def __post_init__(self) -> None:
        width = self.verify_width
        if width is not None and width != AUTO and not (isinstance(width, int) and 1 <= width <= MOST_WIDTH):
            raise ConfigError(f"--verify-width is {width!r}: use a number of drafted tokens, 1 to {MOST_WIDTH}, or {AUTO}.")

    def widths(self, n_drafted: int | None) -> tuple[int, int]:
        """verify_width and inexact_width of struct spark_draft_params. n_drafted: tokens that the flags have drafted, or llama.cpp does
        by itself; None: without --draft, and then what llama-server's own flags draft is verified."""
        if self.verify_width is None:
            return (_ALL, 0) if n_drafted is None else (0, n_drafted)
        return (self.verify_width, 0) if isinstance(self.verify_width, int) else (0, 0)

    def as_args(self) -> list[str]:
        """The flags that say the same, for the children of a router."""
        width = [] if self.verify_width is None else ["--verify-width", str(self.verify_width)]
        return width if self.exact_verify else ["--no-exact-verify", *width]
