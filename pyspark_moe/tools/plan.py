"""pyspark-moe plan: the experts of a model, layer by layer, and the smallest budget that works."""

from __future__ import annotations

import click

from ..budget import format_bytes, format_gib_flag
from ..model_info import read_model_info
from ..placement import smallest_budget


@click.command()
@click.argument("model", type=click.Path())
def plan(model: str) -> None:
    """Shows what MODEL's header says about its experts (`dflash_server --spark-plan` shows what would be done)."""
    info = read_model_info(model)
    click.echo(f"{info.name} ({info.architecture}), {format_bytes(info.file_bytes)} in {len(info.shards)} file(s), context {info.n_ctx_train}")
    if not info.is_moe:
        click.echo("It is a dense model: it has no routed experts.")
        return
    for layer in info.layers:
        click.echo(
            f"  block {layer.layer:3d}  {layer.n_expert} experts of {format_bytes(layer.expert_bytes)} in {len(layer.strides)} tensors, "
            f"{format_bytes(layer.total_bytes)}"
        )
    click.echo(
        f"experts {format_bytes(info.expert_bytes)}, {info.n_expert_used} used by a token in each layer; other weights {format_bytes(info.other_bytes)}"
    )
    smallest = smallest_budget(info.layers, info.n_expert_used)
    click.echo(f"smallest budget: --spark-ram {format_gib_flag(smallest)} ({format_bytes(smallest)})")
