"""The part of a decision that concerns a GPU. Two steps, both pure: before loading, what is certain already (a refusal, or
that everything fits); once the model and its contexts are there, slots for what is left of the budget, from measured use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from . import device_placement, placement
from .budget import MIB, Serving, Term, base_terms, format_bytes, format_gib_flag, fit_context, total_bytes
from .config import GIB, SparkConfig
from .errors import BudgetError, ConfigError, MachineMemoryError
from .gpu import CONTEXT_BYTES, Gpu
from .model_info import ModelInfo

if TYPE_CHECKING:
    from .decision import Decision

# Kept free of slots: graphs that CUDA records later, and buffers that grow with long contexts.
_RESERVE_BYTES = 96 * MIB
_RESERVE_SHARE = 0.01
# Left to other programs when nobody gave a budget.
_FREE_BYTES = 384 * MIB
# Below this share of the experts, the budget is refused.
_SMALLEST_SHARE = 0.01
# Of the memory for experts, staging takes at most this. Large steps gain more from it than decoding loses.
_STAGING_SHARE = 0.15
# Where no context is asked for, it takes at most this share of what the weights leave.
_CONTEXT_SHARE = 0.2


@dataclass(frozen=True)
class GpuUse:
    """gpu: holds the fast slots. limit_bytes: of its memory this process may use, its CUDA context included.
    is_promised: the user gave the limit. is_settled: slots are final; else they follow from measured use after loading."""

    gpu: Gpu
    limit_bytes: int
    is_promised: bool
    is_settled: bool


def choose_gpu(gpus: tuple[Gpu, ...], serving: Serving, config: SparkConfig) -> Gpu | None:
    """The GPU that gets the fast slots; None: RAM does. Raises ConfigError for a GPU that is asked for and not there."""
    if config.ram_gib is not None or serving.n_gpu_layers == 0:
        if config.vram_gib is not None:
            raise ConfigError(f"--spark-vram {config.vram_gib:g} needs the layers on the GPU, and -ngl 0 keeps them off it: remove one of them.")
        return None
    named = [gpu for gpu in gpus if gpu.name == serving.device] or list(gpus)
    if not named and config.vram_gib is not None:
        raise ConfigError(f"--spark-vram {config.vram_gib:g}: no CUDA device was found. Look at `pyspark-moe doctor`, or use --spark-ram.")
    return named[0] if named else None


def limit_bytes(gpu: Gpu, config: SparkConfig) -> int:
    """What this process may use of the GPU. Raises BudgetError when that is more than the GPU has."""
    if config.vram_gib is None:
        return max(0, gpu.free_bytes + CONTEXT_BYTES - max(_FREE_BYTES, gpu.total_bytes // 50))
    limit = int(config.vram_gib * GIB)
    if limit > gpu.total_bytes:
        raise BudgetError(f"--spark-vram {config.vram_gib:g} is more than {gpu.name} ({gpu.description}) has: {format_bytes(gpu.total_bytes)}. Give less.")
    return limit


def settle_context(model: ModelInfo, serving: Serving, gpu: Gpu, config: SparkConfig) -> Serving:
    """The same with a context when none was asked for: at most a share of what the weights leave, llama-server's own least
    at the least."""
    if serving.n_ctx:
        return serving
    room = limit_bytes(gpu, config) - CONTEXT_BYTES - model.other_bytes
    return fit_context(model, serving, int(room * _CONTEXT_SHARE))


def fits(model: ModelInfo, serving: Serving, gpu: Gpu, config: SparkConfig) -> bool:
    """Whether the whole model surely fits the limit."""
    everything = total_bytes(base_terms(model, serving)) + sum(device_placement.slot_bytes(l, l.n_expert) for l in model.layers)
    return everything + CONTEXT_BYTES + GIB <= min(limit_bytes(gpu, config), gpu.free_bytes + CONTEXT_BYTES)


def decide_on_gpu(decision: Decision, serving: Serving, gpu: Gpu, config: SparkConfig, hotness: Mapping[int, np.ndarray] | None) -> Decision:
    """`decision`, which is on, with what can be said before loading. Raises BudgetError, MachineMemoryError."""
    model, machine = decision.model, decision.machine
    if model.expert_bytes > machine.available_bytes:
        text = (
            f"Experts on a GPU have their homes in pinned RAM: {format_bytes(model.expert_bytes)}, and "
            f"{format_bytes(machine.available_bytes)} is available on {machine.limited_by}."
        )
        if not config.force:
            raise MachineMemoryError(f"{text} Free memory, use -ngl 0 (experts are then read from the file), or start anyway with --spark-force.")
        decision = replace(decision, notes=decision.notes + (f"started by --spark-force: {text}",))
    limit = limit_bytes(gpu, config)
    use = GpuUse(gpu, limit, config.vram_gib is not None, True)
    terms = (*base_terms(model, serving), Term("CUDA context", CONTEXT_BYTES, is_estimate=True))
    if config.slots is not None:
        slots = [min(config.slots, layer.n_expert) for layer in model.layers]
        staging = device_placement.staging_bytes(model.layers, slots)
    elif fits(model, serving, gpu, config):
        slots, staging = [layer.n_expert for layer in model.layers], 0
    else:
        least = total_bytes(terms) + int(model.expert_bytes * _SMALLEST_SHARE)
        if least > limit:
            raise BudgetError(_too_small(terms, use, model, least), least if use.is_promised else None)
        use = replace(use, is_settled=False)
        slots, staging = [0] * len(model.layers), 0
    plan = placement.make_plan(model.layers, slots, policy=config.policy, seed=config.seed, hotness=hotness, fill=True)
    if use.is_settled:
        terms += slot_terms(model, slots, staging)
    return replace(decision, plan=replace(plan, staging_bytes=staging), terms=terms, gpu=use, serving=serving)


def settle(decision: Decision, config: SparkConfig, used: int, free: int, hotness: Mapping[int, np.ndarray] | None = None, *, is_measured: bool = True) -> Decision:
    """The decision with slots for what is left.

    used  bytes of the GPU that this process uses with everything but slots: weights, caches, buffers, context
    free  bytes of it that nobody uses

    Raises BudgetError when less than a hundredth of the experts would fit.
    """
    use, model = decision.gpu, decision.model
    assert use is not None
    reserve = _RESERVE_BYTES + int(use.limit_bytes * _RESERVE_SHARE)
    budget = min(use.limit_bytes - used, free) - reserve
    what = "weights, key/value cache, buffers and CUDA context" + (", measured" if is_measured else "")
    terms = (Term(what, used, is_estimate=not is_measured), Term("reserve", reserve))
    if budget < model.expert_bytes * _SMALLEST_SHARE:
        least = used + reserve + int(model.expert_bytes * _SMALLEST_SHARE)
        raise BudgetError(_too_small(terms, use, model, least), least if use.is_promised else None)
    slots, staging = _split(model, budget, hotness)
    plan = placement.make_plan(model.layers, slots, policy=config.policy, seed=config.seed, hotness=hotness, fill=True)
    plan = replace(plan, staging_bytes=staging)
    return replace(decision, plan=plan, terms=terms + slot_terms(model, slots, staging), gpu=replace(use, is_settled=True), budget_bytes=budget)


def estimate(decision: Decision, config: SparkConfig, hotness: Mapping[int, np.ndarray] | None = None) -> Decision:
    """The same without loading, for plans: from estimates instead of measured use."""
    if decision.gpu is None or decision.gpu.is_settled:
        return decision
    used = total_bytes(decision.terms)
    return settle(decision, config, used, decision.gpu.gpu.free_bytes + CONTEXT_BYTES - used, hotness, is_measured=False)


def least_slots(model: ModelInfo) -> int:
    """Slots that every layer gets before the others go where they are used most: one token's experts."""
    return model.n_expert_used


def _split(model: ModelInfo, budget: int, hotness: Mapping[int, np.ndarray] | None) -> tuple[list[int], int]:
    """Slots per layer and bytes of staging that share `budget`."""

    def slots_for(n_bytes: int) -> list[int]:
        chosen = None if hotness is None else device_placement.greedy_slots(model.layers, n_bytes, least_slots(model), hotness)
        return chosen or device_placement.uniform_slots(model.layers, n_bytes)

    slots = slots_for(budget)
    if all(n == layer.n_expert for n, layer in zip(slots, model.layers)):
        return slots, 0
    most = int(budget * _STAGING_SHARE)
    staging = min(most, device_placement.staging_bytes(model.layers, slots_for(budget - most)))
    return slots_for(budget - staging), staging


def slot_terms(model: ModelInfo, slots: list[int], staging: int) -> tuple[Term, ...]:
    """The last two lines of a GPU's bill."""
    fast = sum(device_placement.slot_bytes(layer, n) for layer, n in zip(model.layers, slots))
    return (Term("fast expert slots", fast), Term("staging for large steps", staging))


def _too_small(terms: tuple[Term, ...], use: GpuUse, model: ModelInfo, least: int) -> str:
    bill = ", ".join(f"{term.name} {'at least ' if term.is_estimate else ''}{format_bytes(term.n_bytes)}" for term in terms)
    share = f"a hundredth of the experts {format_bytes(int(model.expert_bytes * _SMALLEST_SHARE))}"
    if use.is_promised:
        return (
            f"--spark-vram {round(use.limit_bytes / GIB, 6):g} is too small: {bill}, {share}. Give at least --spark-vram {format_gib_flag(least)}, "
            "or reduce the context (-c), its precision (-ctk, -ctv) or the micro-batch (-ub)."
        )
    return (
        f"{use.gpu.name} ({use.gpu.description}) has too little memory free, {format_bytes(use.gpu.free_bytes)}: {bill}, {share}. "
        "Free memory on it, or reduce the context (-c)."
    )
