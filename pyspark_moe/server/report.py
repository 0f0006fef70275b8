"""A decision as the block that is printed, and as the JSON in /props and under /spark. Pure."""

from __future__ import annotations

from typing import Any

from ..budget import format_bytes
from ..decision import Decision
from ..routing_profile import ProfileFile, RoutingProfile

PREFIX = "spark:"


def _slots_text(decision: Decision) -> str:
    plan = decision.plan.layers if decision.plan else ()
    n_fast = [p.n_fast for p in plan]
    n_expert = {layer.n_expert for layer in decision.model.layers}
    per_layer = f"{min(n_fast)}" if min(n_fast) == max(n_fast) else f"{min(n_fast)} to {max(n_fast)}"
    total = sum(layer.n_expert for layer in decision.model.layers)
    return f"{per_layer} of {'/'.join(map(str, sorted(n_expert)))} in each of {len(plan)} layers, {sum(n_fast)} of {total} in all"


def block(decision: Decision) -> list[str]:
    """The lines that say what is in effect, without prefix."""
    state = "on" if decision.is_on else "off"
    auto = " (auto)" if decision.mode == "auto" else ""
    lines = [f"{state}{auto}: {decision.why}"]
    if decision.is_on:
        model = decision.model
        lines.append(
            f"  model   {model.name} ({model.architecture}): experts {format_bytes(model.expert_bytes)}, "
            f"{model.n_expert_used} used in each layer; other weights {format_bytes(model.other_bytes)}"
        )
        lines += _ram_lines(decision) if decision.gpu is None else _gpu_lines(decision)
        lines.append(f"  policy  {decision.plan.policy}")
    lines += [f"  note    {note}" for note in decision.notes]
    return lines


def _bill(decision: Decision) -> str:
    return ", ".join(f"{term.name} {'about ' if term.is_estimate else ''}{format_bytes(term.n_bytes)}" for term in decision.terms)


def _ram_lines(decision: Decision) -> list[str]:
    model, machine = decision.model, decision.machine
    home = model.expert_bytes - sum(p.n_fast * l.expert_bytes for p, l in zip(decision.plan.layers, model.layers))
    lines = [f"  fast    {_slots_text(decision)}: {format_bytes(decision.fast_bytes)} of RAM"]
    if decision.has_all_fast:
        lines.append("  home    every expert is fast: none is read again")
    else:
        lines.append(
            f"  home    {format_bytes(home)} of experts in the file; a step that uses more experts of a layer than it has "
            f"slots maps them for that layer, at most {format_bytes(decision.window_bytes)}"
        )
    if decision.budget_bytes is not None:
        used = decision.fast_bytes + decision.window_bytes
        lines.append(f"  budget  {format_bytes(decision.budget_bytes)} for expert weights; at most {format_bytes(used)} are used")
    lines.append(
        f"  memory  {format_bytes(machine.available_bytes)} available on {machine.limited_by}, about {format_bytes(decision.need_bytes)} needed: {_bill(decision)}"
    )
    return lines


def _gpu_lines(decision: Decision) -> list[str]:
    use = decision.gpu
    limit = "may be used" if use.is_promised else "is free for this process"
    lines = [
        f"  gpu     {use.gpu.name}, {use.gpu.description}: {format_bytes(use.limit_bytes)} of {format_bytes(use.gpu.total_bytes)} {limit}",
        f"  context {decision.serving.n_ctx} tokens",
        f"  home    every expert, {format_bytes(decision.model.expert_bytes)}, in pinned RAM; {format_bytes(decision.machine.available_bytes)} "
        f"available on {decision.machine.limited_by}",
    ]
    if use.is_settled:
        return lines + slot_lines(decision)
    return lines + ["  fast    slots follow when the model is loaded and the rest of its memory is measured"]


def slot_lines(decision: Decision) -> list[str]:
    """The lines about fast slots when they have become final, or others."""
    if decision.gpu is None:
        return _ram_lines(decision)[:1]
    return [
        f"  fast    {_slots_text(decision)}: {format_bytes(decision.fast_bytes)} of GPU memory",
        f"  memory  {format_bytes(decision.need_bytes)} of {format_bytes(decision.gpu.limit_bytes)}: {_bill(decision)}",
    ]


def profile_line(file: ProfileFile, profile: RoutingProfile | None) -> str:
    """Where the profile is and what it knows."""
    if profile is None or profile.is_empty:
        return f"none yet; it will be '{file.path}'"
    return f"'{file.path}': {profile.tokens} tokens in {profile.starts} start{'' if profile.starts == 1 else 's'}, the hottest experts start in the fast slots"


def profile_dict(file: ProfileFile, profile: RoutingProfile) -> dict[str, Any]:
    """The same for programs."""
    return {
        "path": str(file.path), "tokens": profile.tokens, "uses": profile.uses, "starts": profile.starts, "updated": profile.updated,
        "sources": dict(profile.sources),
    }


def as_dict(decision: Decision) -> dict[str, Any]:
    """The same for programs; bytes are bytes."""
    model, machine = decision.model, decision.machine
    layers = []
    if decision.plan:
        layers = [
            {"layer": l.layer, "n_expert": l.n_expert, "n_fast": p.n_fast, "expert_bytes": l.expert_bytes}
            for l, p in zip(model.layers, decision.plan.layers)
        ]
    return {
        "mode": decision.mode,
        "active": decision.is_on,
        "why": decision.why,
        "notes": list(decision.notes),
        "policy": decision.plan.policy if decision.plan else None,
        "n_expert_used": model.n_expert_used,
        "layers": layers,
        "bytes": {
            "experts": model.expert_bytes,
            "other_weights": model.other_bytes,
            "fast": decision.fast_bytes,
            "window": decision.window_bytes,
            "budget": decision.budget_bytes,
            "need": decision.need_bytes,
            "available": machine.available_bytes,
        },
        "gpu": _gpu_dict(decision),
    }


def _gpu_dict(decision: Decision) -> dict[str, Any] | None:
    use = decision.gpu
    if use is None:
        return None
    return {
        "name": use.gpu.name,
        "description": use.gpu.description,
        "total_bytes": use.gpu.total_bytes,
        "limit_bytes": use.limit_bytes,
        "staging_bytes": decision.plan.staging_bytes,
        "n_ctx": decision.serving.n_ctx,
    }


def budget_dict(decision: Decision) -> dict[str, Any]:
    """The bill of memory, for /spark/budget."""
    machine = decision.machine
    return {
        "active": decision.is_on,
        "budget_bytes": decision.budget_bytes,
        "need_bytes": decision.need_bytes,
        "terms": [{"name": t.name, "bytes": t.n_bytes, "is_estimate": t.is_estimate} for t in decision.terms],
        "machine": {
            "total_bytes": machine.total_bytes,
            "available_bytes": machine.available_bytes,
            "limited_by": machine.limited_by,
            "memlock_bytes": machine.memlock_bytes,
        },
        "gpu": _gpu_dict(decision),
    }
