"""pyspark-moe quantize-draft: a smaller draft model."""

from __future__ import annotations

import click

from .. import draft_quantization


@click.command(name="quantize-draft")
@click.argument("source", type=click.Path(), metavar="IN")
@click.argument("target", type=click.Path(), metavar="OUT")
@click.option("--scheme", type=click.Choice(draft_quantization.SCHEMES), default="q8_0", show_default=True,
              help="q8_0: every product. q4-mix: products of the layers in q4_0, heads and projections in q8_0.")
def quantize_draft(source: str, target: str, scheme: str) -> None:
    """Writes the DFlash or DSpark draft IN (F16, BF16 or F32) with quantised weights to OUT; metadata is kept."""
    for line in draft_quantization.summary(draft_quantization.quantize_draft(source, target, scheme)):
        click.echo(line)
