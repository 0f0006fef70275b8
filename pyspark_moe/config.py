"""The configuration of expert residency: one frozen dataclass, filled once from flags or arguments, checked here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import ConfigError

GIB = 1024**3
MODES = ("auto", "on", "off")
POLICIES = ("frequency", "static", "chaos")


_MAX_GIB = 2**33  # 2^63 bytes; beyond it nothing can be meant, and arithmetic overflows


def _check_gib(flag: str, value: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value > _MAX_GIB:
        raise ConfigError(f"{flag} is {value!r}: give a memory size in GiB, for example {flag} 8.")
    if value <= 0:
        raise ConfigError(f"{flag} is {value:g}: a memory budget must be greater than 0 GiB; leave the flag out for the automatic choice.")


@dataclass(frozen=True)
class SparkConfig:
    """How experts are kept.

    mode        "on": residency for any mixture-of-experts model. "off": never. "auto" (default): only when the model is
                a mixture of experts that does not fit the memory available.
    vram_gib    GPU memory the whole process may use, GiB; default None: what is free. Needs a CUDA build and a GPU.
    ram_gib     RAM that expert weights may occupy, GiB; default None: chosen from the memory available. Fast slots are in
                RAM then, whatever GPU there is.
    slots       fast slots in every layer, 0 or more, instead of a budget; default None.
    force       start even though the machine seems to have too little memory; default False.
    policy      "frequency" (default), "static" (experts never change slots), "chaos" (tests only).
    seed        of the chaos policy.
    io_threads  threads that read missed experts, 1..64; 0 (default): the library's choice.
    direct_io   read experts past the page cache where the file system allows; default True.
    lock_fast   lock fast slots in RAM as far as the limit allows; default True.
    profile     file that remembers which experts the traffic uses; "auto" (default): beside the model, or in the user's cache
                folder when that cannot be written; "none": nothing is remembered or placed by it.
    history     what a model without a profile is made to read first, so that its hot experts are known: "none" (default of
                this class), "auto" (dflash_server's default: the sessions of coding agents on this machine), or a folder of them.
    history_tokens, history_seconds  at most this many tokens, and this long; defaults 100000 and 45.

    Raises ConfigError, naming the command-line flag, for a value that cannot be used.
    """

    mode: str = "on"
    vram_gib: float | None = None
    ram_gib: float | None = None
    slots: int | None = None
    force: bool = False
    policy: str = "frequency"
    seed: int = 0
    io_threads: int = 0
    direct_io: bool = True
    lock_fast: bool = True
    profile: str = "auto"
    history: str = "none"
    history_tokens: int = 100_000
    history_seconds: float = 45.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}: use one of {', '.join(MODES)}.")
        _check_gib("--spark-vram", self.vram_gib)
        _check_gib("--spark-ram", self.ram_gib)
        if self.slots is not None and (isinstance(self.slots, bool) or not isinstance(self.slots, int) or self.slots < 0):
            raise ConfigError(f"--spark-slots is {self.slots!r}: give the number of fast slots in every layer, 0 or more.")
        if self.slots is not None and self.ram_gib is not None:
            raise ConfigError(
                f"--spark-slots {self.slots} and --spark-ram {self.ram_gib:g} both size the fast slots: give one of them."
            )
        if self.vram_gib is not None and (self.slots is not None or self.ram_gib is not None):
            other = f"--spark-slots {self.slots}" if self.slots is not None else f"--spark-ram {self.ram_gib:g}"
            raise ConfigError(f"--spark-vram {self.vram_gib:g} and {other} both size the fast slots: give one of them.")
        if self.policy not in POLICIES:
            raise ConfigError(f"--spark-policy is {self.policy!r}: use one of {', '.join(POLICIES)}.")
        if not 0 <= self.io_threads <= 64:
            raise ConfigError(f"--spark-io-threads is {self.io_threads}: use 1 to 64, or 0 for the default.")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}: use 0 to 2^64-1.")
        if not self.profile or not self.history:
            raise ConfigError(f"{'--spark-history' if self.profile else '--spark-profile'} is empty: give a path, auto or none.")
        if self.history_tokens < 1 or isinstance(self.history_tokens, bool):
            raise ConfigError(f"--spark-history-tokens is {self.history_tokens}: give 1 or more, or turn it off with --spark-history none.")
        if not math.isfinite(self.history_seconds) or self.history_seconds <= 0:
            raise ConfigError(f"--spark-history-seconds is {self.history_seconds:g}: give more than 0, or turn it off with --spark-history none.")
        if self.mode == "off" and self.has_budget:
            raise ConfigError("--no-spark turns residency off, but a budget is given too: remove one of them.")

    @property
    def has_budget(self) -> bool:
        """True when the user named an amount of memory or of slots."""
        return self.ram_gib is not None or self.vram_gib is not None or self.slots is not None

    @property
    def ram_bytes(self) -> int | None:
        """The RAM budget in bytes, or None."""
        return None if self.ram_gib is None else int(self.ram_gib * GIB)
