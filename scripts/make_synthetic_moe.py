#!/usr/bin/env python3
"""Writes mixture-of-experts models with random weights as GGUF: tiny ones for tests, large ones for benchmarks.

    make_synthetic_moe.py model --preset qwen3moe --out tiny.gguf
    make_synthetic_moe.py model --preset bench-6gib --layers 30 --out big.gguf
    make_synthetic_moe.py model --preset qwen36-35b-a3b --out published.gguf
    make_synthetic_moe.py prompt published.gguf --topic 3 --tokens 512
    make_synthetic_moe.py lora tiny.gguf --out adapter.gguf
    make_synthetic_moe.py presets

The models load in llama.cpp and route like trained ones (the hottest 60 % of the experts of a layer take 93 % of the
routing, differently by topic), but what they write is noise. The tokenizer is copied from another GGUF, by default the
demo model's, and padded with unused tokens to a larger vocabulary.

laguna-xs2, qwen36-35b-a3b and gpt-oss-20b are published models in true size, 11 to 20 GiB: a minute or two each.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from synthetic_moe.blocks import TYPES
from synthetic_moe.shape import PRESETS
from synthetic_moe.writer import model_prompt, tensor_specs, tokenizer_sizes, write_adapter, write_model

DEMO = Path(__file__).resolve().parents[1] / "pyspark_moe" / "data" / "target-Q4_K_M.gguf"


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option("--preset", type=click.Choice(list(PRESETS)), required=True, help="Architecture and sizes to start from.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write.")
@click.option("--layers", "n_layer", type=click.IntRange(1), help="Blocks.")
@click.option("--embd", "n_embd", type=click.IntRange(32), help="Embedding length.")
@click.option("--experts", "n_expert", type=click.IntRange(1), help="Experts of a layer.")
@click.option("--used", "n_used", type=click.IntRange(1), help="Experts that a token selects.")
@click.option("--ff-exp", "n_ff_exp", type=click.IntRange(32), help="Feed-forward length of an expert.")
@click.option("--type", "expert_type", type=click.Choice(TYPES), help="Storage of gate and up.")
@click.option("--down-type", type=click.Choice(TYPES), help="Storage of down, in all layers.")
@click.option("--vocab", "n_vocab", type=click.IntRange(1), help="Vocabulary, the tokenizer's and padding. Default: the preset's.")
@click.option("--skew", type=click.FloatRange(0), help="Log popularity of the hottest over the coldest expert; 0: flat.")
@click.option("--hot-share", type=click.FloatRange(0.6, 1), help="Instead of --skew: share of the hottest 60 %. Default 0.93.")
@click.option("--affinity", type=click.FloatRange(0), help="How differently topics use experts. Default 0.5.")
@click.option("--topics", "n_topics", type=click.IntRange(1), help="Topics; a token's topic is its id * topics / tokens.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--split-tensors", default=0, show_default=True, help="Tensors of a shard; 0: one file.")
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True), default=DEMO, help="GGUF whose tokenizer is copied.")
@click.option("--workers", "n_workers", type=click.IntRange(1), help="Threads that write. Default: one on each core.")
@click.option("--dry-run", is_flag=True, help="Print the sizes, write nothing.")
def model(preset: str, out: Path, seed: int, split_tensors: int, tokenizer: Path, n_workers: int | None, dry_run: bool,
          **changes: object) -> None:  # fmt: skip
    """Write a model."""
    try:
        shape = PRESETS[preset].with_changes(**tokenizer_sizes(tokenizer), **changes, down_rest_type=changes["down_type"])
        if changes["n_vocab"] is None:
            shape = shape.with_changes(n_vocab=max(shape.n_vocab, shape.n_token))
        specs, skew = tensor_specs(shape, seed)
        total = sum(spec.n_bytes for spec in specs)
        experts = sum(spec.n_bytes for spec in specs if "_exps.weight" in spec.name)
        click.echo(f"{out}: {len(specs)} tensors, {total / 2**20:,.1f} MiB, experts {experts / 2**20:,.1f} MiB, router skew {skew:.2f}")
        if not dry_run:
            start = time.monotonic()
            written = write_model(out, shape, tokenizer, seed=seed, split_max_tensors=split_tensors, n_workers=n_workers)
            speed = written.n_bytes / 2**20 / (time.monotonic() - start)
            click.echo(f"wrote {len(written.files)} file(s), {written.n_bytes / 2**20:,.1f} MiB at {speed:,.0f} MiB/s; load {written.path}")
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--topic", type=click.IntRange(0), required=True)
@click.option("--tokens", "n", type=click.IntRange(1), required=True, help="Length of the prompt.")
@click.option("--seed", default=0, show_default=True, help="Another prompt of the topic.")
def prompt(model: Path, topic: int, n: int, seed: int) -> None:
    """Print a prompt of a topic of MODEL (its first shard): token ids as JSON, as llama-server's /completion takes them."""
    try:
        click.echo(json.dumps(model_prompt(model, topic, n, seed)))
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("base", type=click.Path(path_type=Path, exists=True))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write.")
@click.option("--rank", type=click.IntRange(1), default=4, show_default=True)
@click.option("--seed", default=0, show_default=True)
def lora(base: Path, out: Path, rank: int, seed: int) -> None:
    """Write a random LoRA adapter on the experts of BASE, a model in one file."""
    try:
        click.echo(f"wrote {write_adapter(out, base, rank=rank, seed=seed)}")
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
def presets() -> None:
    """List the presets."""
    for name, shape in PRESETS.items():
        click.echo(f"{name:18} {shape.arch}, {shape.n_layer} layers of {shape.n_expert} experts, {shape.n_used} used, "
                   f"embedding {shape.n_embd}, ff {shape.n_ff_exp}, {shape.expert_type}/{shape.down_type}")  # fmt: skip


if __name__ == "__main__":
    main()
