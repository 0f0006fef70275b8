"""The arms of `pyspark-moe bench`: which servers are compared, with which flags, and whose tokens must be the same. Values in, values out.

On a GPU                                     On the CPU
all-resident  --no-spark, all on the GPU     all-resident  --no-spark; llama.cpp repacks expert weights
spark-100%    a fast slot for every expert   the same
spark-B       budget B: a share, or GiB      the same; GiB are of RAM then
cpu-moe-B     --no-spark --n-cpu-moe M at    mmap          --no-spark --no-repack: all weights are pages of the file, which the
              the memory of spark-B                        system drops and reads again when memory is short
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..budget import Serving, base_terms, total_bytes
from ..config import GIB
from ..decision_gpu import CONTEXT_BYTES
from ..errors import ConfigError
from ..model_info import ModelInfo
from . import sizes

ALL_RESIDENT, ALL_SLOTS = "all-resident", 1_000_000
_BUDGET = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%|gib|g)", re.IGNORECASE)
_PROCESS_BYTES = 256 << 20  # of a server, beside its model
_STAGING = 1.2  # a store on a GPU takes more than its slots, for bringing experts ahead of their layer
_MEMORY_SHARE = 0.8  # of what is available, for servers that stay loaded together


@dataclass(frozen=True)
class Budget:
    """What is kept fast: `share` of the experts, 0 to 1, or what fits `gib` GiB; the other is None."""

    share: float | None = None
    gib: float | None = None

    @property
    def label(self) -> str:
        return f"{self.gib:g}GiB" if self.share is None else f"{100 * self.share:g}%"


def parse_budgets(text: str) -> tuple[Budget, ...]:
    """Budgets from "60%,40%,8GiB". Raises ConfigError for anything else, and for what is no share or no memory."""
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        match = _BUDGET.fullmatch(word)
        if not match:
            raise ConfigError(f"--budgets has {word!r}: give shares of the experts and GiB of memory, as in 60%,40%,8GiB.")
        value = float(match[1])
        if match[2] == "%":
            if value >= 100:
                raise ConfigError(f"--budgets has {word!r}: give less than 100%, which is always measured.")
            found.append(Budget(share=value / 100))
        elif value > 0 and math.isfinite(value):
            found.append(Budget(gib=value))
        else:
            raise ConfigError(f"--budgets has {word!r}: give more than 0 GiB.")
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Setup:
    """What is compared.

    on_gpu         fast slots are on a GPU; else in RAM, and everything is computed by the CPU
    engine         dflash_server's command; stock: another llama-server's, for the offload arms, () to use the engine
    shared         flags of all servers, the last ones; spark: those of ours with --spark only
    with_resident, with_offload   False leaves these arms out
    """

    model: ModelInfo
    budgets: tuple[Budget, ...]
    on_gpu: bool
    n_ctx: int
    n_batch: int
    engine: tuple[str, ...]
    stock: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    spark: tuple[str, ...] = ()
    with_resident: bool = True
    with_offload: bool = True

    @property
    def serving(self) -> Serving:
        return Serving(self.n_ctx, self.n_batch, self.n_batch, n_gpu_layers=-1 if self.on_gpu else 0)


@dataclass(frozen=True)
class Arm:
    """A server that is compared.

    is_ours     it is dflash_server; has_store: with --spark
    budget      of ours with a store, and of the offload arm beside it
    inexact     why its tokens need not be those of the reference; "": they must be
    beside      the offload arm is sized by the memory of this one; "": it needs no size
    may_fail    it may be too large for the GPU: then it is left out
    """

    name: str
    program: tuple[str, ...]
    flags: tuple[str, ...]
    is_ours: bool
    has_store: bool = False
    budget: Budget | None = None
    inexact: str = ""
    beside: str = ""
    may_fail: bool = False

    def with_flags(self, *flags: str) -> Arm:
        return replace(self, flags=(*self.flags, *flags))


def make_arms(setup: Setup) -> tuple[Arm, ...]:
    """All arms; one that another is sized by comes before it."""
    n = str(setup.n_batch)
    base = ("-m", str(setup.model.path), "-c", str(setup.n_ctx), "-np", "1", "-b", n, "-ub", n, "-ngl", "99" if setup.on_gpu else "0",
            "--no-cache-prompt", "--cache-ram", "0", "--ctx-checkpoints", "0", *setup.shared)  # fmt: skip
    repacks = not setup.on_gpu and not {"--no-repack", "-nr"} & set(setup.shared)
    arms = []
    if setup.with_resident:
        why = "llama.cpp repacks expert weights, and those kernels round otherwise" if repacks else ""
        arms.append(Arm(ALL_RESIDENT, setup.engine, (*base, "--no-spark"), True, inexact=why, may_fail=setup.on_gpu))
    stock_program, stock_flags = (setup.stock, ()) if setup.stock else (setup.engine, ("--no-spark",))
    another = "another program" if setup.stock else ""
    for budget in (Budget(share=1.0), *setup.budgets):
        spark = f"spark-{budget.label}"
        arms.append(Arm(spark, setup.engine, (*base, "--spark", *_size(setup, budget), *setup.spark), True, True, budget))
        if setup.on_gpu and setup.with_offload and budget.share != 1.0:
            why = another or "experts on the CPU are rounded otherwise than on the GPU"
            arms.append(Arm(f"cpu-moe-{budget.label}", stock_program, (*base, *stock_flags), not setup.stock, False, budget, why, spark, True))
    if not setup.on_gpu and setup.with_offload:
        why = another or ("its other weights are not repacked either, and round otherwise" if repacks else "")
        arms.append(Arm("mmap", stock_program, (*base, *stock_flags, "--no-repack"), not setup.stock, inexact=why))
    return tuple(arms)


def _size(setup: Setup, budget: Budget) -> tuple[str, str]:
    if budget.share is None:
        return ("--spark-vram" if setup.on_gpu else "--spark-ram"), repr(budget.gib)
    slots = ALL_SLOTS if budget.share == 1.0 else sizes.slots_for_share(setup.model.layers, budget.share)
    return "--spark-slots", str(slots)


def offload_of(arms: Sequence[Arm], arm: Arm) -> str | None:
    """The name of the offload arm that this one with a store is compared with; None where there is none."""
    if not arm.has_store:
        return None
    return next((other.name for other in arms if other.beside == arm.name or other.name == "mmap"), None)


def fit_together(setup: Setup, arms: Sequence[Arm], free_ram: int, free_gpu: int | None) -> bool:
    """Whether servers for all arms can stay loaded at the same time, by estimates. Bytes; free_gpu: of the GPU, None when it
    cannot be told, which is a no."""
    model = setup.model
    context = total_bytes(base_terms(model, setup.serving)[1:])
    ram = gpu = 0
    for arm in arms:
        budget = arm.budget or Budget(share=1.0)
        if not setup.on_gpu:
            experts = int(budget.gib * GIB) if budget.share is None else int(budget.share * model.expert_bytes)
            ram += model.other_bytes + experts + context + _PROCESS_BYTES
            continue
        slots = int(budget.share * model.expert_bytes * (_STAGING if budget.share < 1 else 1)) if budget.share is not None else 0
        gpu += max(CONTEXT_BYTES + context + model.other_bytes + slots, int((budget.gib or 0) * GIB))
        ram += _PROCESS_BYTES + (model.expert_bytes if arm.has_store else 0)
    if setup.on_gpu and any(arm.beside for arm in arms):
        ram += model.tensor_bytes  # the file's pages, once for all of them
    return ram <= _MEMORY_SHARE * free_ram and (not setup.on_gpu or (free_gpu is not None and gpu <= _MEMORY_SHARE * free_gpu))


def first_n_cpu_moe(setup: Setup, budget: Budget | None, slots_bytes: int, base_memory: int | None, limit: int | None) -> int:
    """--n-cpu-moe to try first: by the memory of a process with everything on the GPU where that was measured, else by the
    bytes of experts that the budget keeps there. slots_bytes: those of the store that it is compared with."""
    layers = setup.model.layers
    if base_memory is not None and limit is not None:
        return sizes.n_cpu_moe(layers, sizes.limit_from_memory(layers, base_memory, limit))
    share = budget.share if budget else None
    return sizes.n_cpu_moe(layers, slots_bytes if share is None else sizes.resident_bytes(layers, sizes.slots_for_share(layers, share)))


def next_n_cpu_moe(setup: Setup, m: int, memory: int, limit: int, too_low: int) -> int:
    """--n-cpu-moe after a try with m took `memory` bytes where `limit` are allowed; m when it is the one. too_low: the largest
    that is known to take too much, -1 for none."""
    layers = setup.model.layers
    wanted = sizes.n_cpu_moe(layers, sizes.kept_bytes(layers, m) + limit - memory)
    least = max(too_low, m if memory > limit else -1) + 1
    return min(max(wanted, least), layers[-1].layer + 1)
