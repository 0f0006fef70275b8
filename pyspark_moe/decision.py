"""What residency does for one model on one machine with one configuration: on or off, why, how many slots, or a refusal.

Pure: everything it needs is handed in. The server, the command line and SparkLlama all act on its result, so what is
printed, what /props says and what is loaded cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from . import device_placement, placement
from .budget import MIB, Serving, Term, base_terms, format_bytes, format_gib_flag, settle_context, total_bytes
from .config import GIB, SparkConfig
from .decision_gpu import GpuUse, choose_gpu, decide_on_gpu, fits, least_slots, slot_terms
from .decision_gpu import settle_context as settle_context_on_gpu
from .errors import BudgetError, ConfigError, MachineMemoryError, NoExpertsError
from .gpu import Gpu
from .memory import MachineMemory
from .model_info import ModelInfo

# Left free when the budget is chosen for the user: other programs, the Python process, growth of buffers.
_MARGIN_BYTES = 256 * MIB
_MARGIN_SHARE = 0.05


@dataclass(frozen=True)
class Decision:
    """The effective configuration.

    is_on       experts are kept by a store.
    why         one sentence: what led here.
    plan        slots for the store; None when off.
    terms       what the configuration needs, bytes by term.
    budget_bytes  what expert weights may occupy; None when nobody set or chose one.
    notes       what was not done, and why; warnings.
    gpu         the GPU that holds the fast slots; None: RAM does. Then the terms are bytes of its memory.
    serving     how the model will be used, with the context that it gets.
    """

    mode: str
    is_on: bool
    why: str
    model: ModelInfo
    machine: MachineMemory
    plan: placement.ResidencyPlan | None = None
    terms: tuple[Term, ...] = ()
    budget_bytes: int | None = None
    notes: tuple[str, ...] = ()
    gpu: GpuUse | None = None
    serving: Serving = Serving()

    @property
    def need_bytes(self) -> int:
        return total_bytes(self.terms)

    @property
    def fast_bytes(self) -> int:
        """Bytes of all fast slots."""
        if self.plan is None:
            return 0
        cost = device_placement.slot_bytes if self.gpu else placement.fast_bytes
        return sum(cost(layer, p.n_fast) for layer, p in zip(self.model.layers, self.plan.layers))

    @property
    def window_bytes(self) -> int:
        """Bytes of RAM that one layer's other experts occupy for a moment in a large step; 0 with a GPU."""
        if self.plan is None or self.gpu is not None:
            return 0
        return max((placement.window_bytes(layer, p.n_fast) for layer, p in zip(self.model.layers, self.plan.layers)), default=0)

    @property
    def has_all_fast(self) -> bool:
        """Every expert has its fast slot: nothing is ever read again."""
        return self.plan is not None and all(p.n_fast >= l.n_expert for l, p in zip(self.model.layers, self.plan.layers))


def decide(
    model: ModelInfo,
    machine: MachineMemory,
    config: SparkConfig,
    serving: Serving = Serving(),
    *,
    has_cuda: bool = False,
    cuda_reason: str = "",
    has_overrides: bool = False,
    gpus: tuple[Gpu, ...] = (),
    hotness: Mapping[int, np.ndarray] | None = None,
) -> Decision:
    """Decides; see the class for the result. With a GPU whose slots depend on measured use, gpu.is_settled is False.

    has_cuda, cuda_reason  whether this build has a CUDA backend, and the build's sentence about it
    gpus                   those that ggml sees
    has_overrides          the user placed tensors with llama-server's own flags (-ot, --cpu-moe, --n-cpu-moe)
    hotness                layer -> uses of each expert (placement.prior_uses): who starts in the slots and, on a GPU, how many each
                           layer gets

    Raises ConfigError (a flag this build cannot honour), NoExpertsError (a budget for a dense model), BudgetError (a
    budget that cannot be met), MachineMemoryError (too little memory, and config.force is not set).
    """
    asked = serving
    serving = settle_context(model, serving, machine.physical_bytes)

    def off(why: str, notes: tuple[str, ...] = ()) -> Decision:
        return Decision(config.mode, False, why, model, machine, terms=base_terms(model, serving), notes=notes, serving=serving)

    if config.mode == "off":
        return off("--no-spark")
    check_budgets(config, machine, has_cuda, cuda_reason)
    gpu = choose_gpu(gpus, serving, config)
    if not model.is_moe:
        if config.has_budget:
            raise NoExpertsError(
                f"'{model.path.name}' is a dense model ({model.architecture}): it has no experts, so an expert budget means nothing. "
                "Remove --spark-ram, --spark-vram or --spark-slots, or use a mixture-of-experts model."
            )
        return off(f"'{model.path.name}' is a dense model ({model.architecture}): nothing to do")
    is_auto = config.mode == "auto" and not config.has_budget
    if has_overrides:
        if is_auto:
            return off("you placed tensors yourself (-ot, --cpu-moe or --n-cpu-moe)")
        raise ConfigError(
            "--spark places the experts, and so do -ot, --override-tensor, --cpu-moe and --n-cpu-moe: remove those, or use --no-spark."
        )
    on_gpu = settle_context_on_gpu(model, asked, gpu, config) if gpu is not None else serving
    if is_auto:
        everything = model.tensor_bytes + total_bytes(base_terms(model, serving)[1:])
        if gpu is not None and fits(model, on_gpu, gpu, config):
            return off(f"the model fits {gpu.name}, {format_bytes(gpu.free_bytes)} free (--spark turns residency on regardless)")
        if gpu is None and everything <= machine.available_bytes:
            return off(
                f"the model fits: it needs {format_bytes(everything)} of the {format_bytes(machine.available_bytes)} available "
                "(--spark turns residency on regardless)"
            )
    try:
        if gpu is not None:
            on = Decision(config.mode, True, _why_on_gpu(gpu, config, is_auto), model, machine)
            return decide_on_gpu(on, on_gpu, gpu, config, hotness)
        why = "the model does not fit the memory available" if is_auto else "--spark" if config.mode == "on" else "a budget was given"
        return _decide_on(model, machine, config, serving, hotness, why)
    except (BudgetError, MachineMemoryError) as e:
        if not is_auto:
            raise
        return off("the model does not fit, but residency would not either", (str(e),))


def replan(decision: Decision, config: SparkConfig, hotness: Mapping[int, np.ndarray], n_fast: Sequence[int] | None = None) -> Decision:
    """The same budget with slots for this hotness (see placement.prior_uses): their number in each layer, unless the user or
    `n_fast` gave it, and who is in them first. Only where decision.plan is there and final."""
    model, plan = decision.model, decision.plan
    assert plan is not None
    slots = list(n_fast) if n_fast is not None else best_slots(decision, config, hotness)
    terms = decision.terms
    if decision.gpu is None:
        new = placement.make_plan(model.layers, slots, policy=plan.policy, seed=plan.seed, hotness=hotness)
        expert_terms = _expert_terms(model, slots)
    else:
        new = placement.make_plan(model.layers, slots, policy=plan.policy, seed=plan.seed, hotness=hotness, fill=True)
        new = replace(new, staging_bytes=plan.staging_bytes)
        expert_terms = slot_terms(model, slots, plan.staging_bytes)
    return replace(decision, plan=new, terms=terms[: -len(expert_terms)] + expert_terms)


def best_slots(decision: Decision, config: SparkConfig, hotness: Mapping[int, np.ndarray]) -> list[int]:
    """Fast slots of each layer that serve this hotness best within the decision's budget; the user's where there is none.

    In RAM they stay: the window of large steps grows with the layer that has fewest slots, so uneven slots cost more of them than
    they gain (docs/decisions/0042)."""
    model, plan = decision.model, decision.plan
    assert plan is not None
    current = [p.n_fast for p in plan.layers]
    if config.slots is not None or decision.budget_bytes is None or decision.gpu is None:
        return current
    return device_placement.greedy_slots(model.layers, decision.budget_bytes - plan.staging_bytes, least_slots(model), hotness) or current


def keeps_budget(decision: Decision, n_fast: Sequence[int]) -> bool:
    """Whether these slots keep the decision's budget."""
    layers, budget = decision.model.layers, decision.budget_bytes
    if budget is None or decision.plan is None:
        return False
    if decision.gpu is None:
        return placement.resident_bytes(layers, n_fast) <= budget
    return sum(map(device_placement.slot_bytes, layers, n_fast)) <= budget - decision.plan.staging_bytes


def check_budgets(config: SparkConfig, machine: MachineMemory, has_cuda: bool = False, cuda_reason: str = "") -> None:
    """Refuses budgets that no model could change: ConfigError for GPU memory, BudgetError for more RAM than there is."""
    if config.vram_gib is not None and not has_cuda:
        reason = f" ({cuda_reason})" if cuda_reason else ""
        raise ConfigError(
            f"--spark-vram {config.vram_gib:g} needs a CUDA build, and this build has no CUDA backend{reason}. "
            "Use --spark-ram, or build again with the CUDA toolkit installed."
        )
    if config.ram_bytes is not None and config.ram_bytes > machine.total_bytes:
        limit = f" (limit of control group {machine.cgroup.path})" if machine.cgroup and machine.total_bytes < machine.physical_bytes else ""
        raise BudgetError(f"--spark-ram {config.ram_gib:g} is more than this machine has: {format_bytes(machine.total_bytes)}{limit}. Give less.")


def _why_on_gpu(gpu: Gpu, config: SparkConfig, is_auto: bool) -> str:
    if is_auto:
        return f"the model does not fit the memory of {gpu.name}"
    if config.slots is not None:
        return f"--spark-slots {config.slots}"
    return f"--spark-vram {config.vram_gib:g}" if config.vram_gib is not None else "--spark; the budget is the GPU's free memory"


def _decide_on(
    model: ModelInfo,
    machine: MachineMemory,
    config: SparkConfig,
    serving: Serving,
    hotness: Mapping[int, np.ndarray] | None,
    why: str,
) -> Decision:
    base = base_terms(model, serving)
    notes: list[str] = []
    budget = config.ram_bytes
    if config.slots is not None:
        slots = [min(config.slots, layer.n_expert) for layer in model.layers]
        why = f"{why}, --spark-slots {config.slots}"
        most = max(layer.n_expert for layer in model.layers)
        if config.slots > most:
            notes.append(f"--spark-slots {config.slots}: a layer has {most} experts, so {most} are used")
        if config.slots < 3 * model.n_expert_used and any(n < layer.n_expert for n, layer in zip(slots, model.layers)):
            notes.append(f"fewer than {3 * model.n_expert_used} slots a layer (three times what a token uses) miss often")
    elif budget is not None:
        why = f"{why}, --spark-ram {config.ram_gib:g}"
        slots = _slots_for(model, machine, budget)
    else:
        budget = _choose_budget(model, machine, base, config)
        why = f"{why}; the budget is chosen from {format_bytes(machine.available_bytes)} available"
        slots = _slots_for(model, machine, budget, is_chosen=True)
    plan = placement.make_plan(model.layers, slots, policy=config.policy, seed=config.seed, hotness=hotness)
    terms = base + _expert_terms(model, slots)
    decision = Decision(config.mode, True, why, model, machine, plan, terms, budget, tuple(notes), serving=serving)
    return _check_machine(decision, config)


def _expert_terms(model: ModelInfo, slots: list[int]) -> tuple[Term, ...]:
    fast = sum(placement.fast_bytes(layer, n) for layer, n in zip(model.layers, slots))
    window = max(placement.window_bytes(layer, n) for layer, n in zip(model.layers, slots))
    return (Term("fast expert slots", fast), Term("one layer's other experts, while a large step reads them", window))


def _choose_budget(model: ModelInfo, machine: MachineMemory, base: tuple[Term, ...], config: SparkConfig) -> int:
    margin = max(_MARGIN_BYTES, int(machine.available_bytes * _MARGIN_SHARE))
    free = machine.available_bytes - total_bytes(base) - margin
    smallest = placement.smallest_budget(model.layers, model.n_expert_used)
    return max(free, smallest) if config.force else free


def _slots_for(model: ModelInfo, machine: MachineMemory, budget: int, *, is_chosen: bool = False) -> list[int]:
    smallest = placement.smallest_budget(model.layers, model.n_expert_used)
    slots = placement.uniform_slots(model.layers, budget, model.n_expert_used)
    if slots is not None:
        return slots
    needs = (
        f"one token uses {model.n_expert_used} experts in each of {len(model.layers)} layers, and a prompt reads one layer's "
        f"experts at a time: at least {format_bytes(smallest)}"
    )
    if is_chosen:
        raise MachineMemoryError(
            f"Only {format_bytes(max(0, budget))} of {format_bytes(machine.available_bytes)} available on {machine.limited_by} is left for experts; {needs}. "
            "Free memory, reduce the context (-c), or start anyway with --spark-force."
        )
    raise BudgetError(
        f"--spark-ram {round(budget / GIB, 6):g} ({format_bytes(budget)}) is too small: {needs}. The smallest budget that works is "
        f"--spark-ram {format_gib_flag(smallest)}.",
        smallest,
    )


def _check_machine(decision: Decision, config: SparkConfig) -> Decision:
    machine = decision.machine
    if decision.need_bytes <= machine.available_bytes:
        return decision
    bill = ", ".join(f"{term.name} {'at least ' if term.is_estimate else ''}{format_bytes(term.n_bytes)}" for term in decision.terms)
    text = (
        f"This needs {format_bytes(decision.need_bytes)} ({bill}), and {format_bytes(machine.available_bytes)} is available "
        f"on {machine.limited_by}."
    )
    if not config.force:
        raise MachineMemoryError(f"{text} Give a smaller --spark-ram or context (-c), free memory, or start anyway with --spark-force.")
    return replace(decision, notes=decision.notes + (f"started by --spark-force: {text}",))
