"""pyspark-moe pregate: how well a layer's experts can be guessed before the layer is reached."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..errors import ConfigError
from ..fingerprint import model_fingerprint
from ..model_info import read_model_info
from ..pregate.recall import RECALL_AT, is_held_out, recalls, recency_scores
from ..pregate.routers import read_router
from ..routing_trace import Trace, read_trace
from ..shared_file import check_own_result, replace_file

_LOSSES = ("bce", "listnet", "ranknet")
_BASELINES = ("temporal", "router")


def _mean(layers: list[dict[str, Any]], method: str) -> dict[str, float]:
    return {f"recall@{k}": round(float(np.mean([layer[method][f"recall@{k}"] for layer in layers])), 5) for k in RECALL_AT}


def _check(trace: Trace, model: Path) -> None:
    if not trace.header.hidden:
        raise ConfigError(f"'{trace.path}' has no router inputs: record it again with --hidden.")
    if len(trace.header.layers) < 2 or trace.routing.n_tokens < 512:
        raise ConfigError(f"'{trace.path}' has {trace.routing.n_tokens} tokens of {len(trace.header.layers)} layers: record 512 tokens or more of two layers or more.")
    if trace.header.fingerprint and trace.header.fingerprint != model_fingerprint(read_model_info(model)):
        raise ConfigError(f"'{trace.path}' was recorded from another model ('{trace.header.model}') than '{model}': give that one.")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--model", required=True, type=click.Path(path_type=Path), help="The GGUF that the trace was recorded from: its routers are read.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
@click.option("--loss", "losses", multiple=True, type=click.Choice(_LOSSES), help="Loss to train with; may be given again. [default: all]")
@click.option("--baselines-only", is_flag=True, help="Train nothing; PyTorch is not needed.")
@click.option("--seed", "seeds", multiple=True, default=(0,), show_default=True, type=int, help="Of split and training; may be given again.")
@click.option("--test-fraction", default=0.2, show_default=True, type=click.FloatRange(0, 1, min_open=True, max_open=True), help="Of the tokens, held out.")
@click.option("--epochs", default=8, show_default=True, type=click.IntRange(1))
@click.option("--width", default=128, show_default=True, type=click.IntRange(1), help="Of the network's hidden layer.")
def pregate(
    trace: Path, model: Path, out: Path | None, losses: tuple[str, ...], baselines_only: bool, seeds: tuple[int, ...], test_fraction: float,
    epochs: int, width: int,
) -> None:  # fmt: skip
    """Trains a guess of each layer's experts from the input of the router before, and says how much of them it finds.

    TRACE comes from `pyspark-moe trace --hidden`. Compared on tokens that no training saw: `temporal`, the experts of the
    tokens before; `router`, the layer's own router on the earlier input; and networks trained with each loss.
    """
    read = read_trace(trace)
    _check(read, model)
    if out is not None:
        _check_place(out)
    chosen = () if baselines_only else losses or _LOSSES
    if chosen:
        from ..pregate.train import Training, train
    info = read_model_info(model)
    runs = []
    n_layers = len(read.header.layers)
    with click.progressbar(length=len(seeds) * (n_layers - 1), label="Layers", file=sys.stderr) as bar:
        for seed in seeds:
            layers: list[dict[str, Any]] = []
            test_block = is_held_out(read.routing.n_tokens, test_fraction, seed)
            before = read.hidden(0)
            for index in range(1, n_layers):
                selected, layer = read.routing.experts[:, index], read.header.layers[index]
                is_there = np.isfinite(before).all(axis=1) & (selected[:, 0] >= 0)
                test, fit = test_block & is_there, ~test_block & is_there
                router = read_router(info, layer)
                everywhere = recency_scores(selected[is_there], read.header.n_expert[index])
                found: dict[str, Any] = {
                    "layer": layer,
                    "temporal": recalls(everywhere[test[is_there]], selected[test]),
                    "router": recalls(router.scores(before[test]), selected[test]),
                }
                for loss in chosen:
                    score = train(before[fit], selected[fit], router, loss, Training(width=width, epochs=epochs, seed=seed))
                    found[loss] = recalls(score(before[test]), selected[test])
                layers.append(found)
                before = read.hidden(index)
                bar.update(1)
            runs.append({"seed": seed, "n_train": int((~test_block).sum()), "n_test": int(test_block.sum()), "layers": layers})
    methods = (*_BASELINES, *chosen)
    means = {method: _mean([layer for run in runs for layer in run["layers"]], method) for method in methods}
    _show(runs, methods, means)
    if out is not None:
        settings = {"test_fraction": test_fraction, "epochs": epochs, "width": width, "seeds": list(seeds)}
        value = {"model": read.header.model, "fingerprint": read.header.fingerprint, "settings": settings, "means": means, "runs": runs}
        try:
            replace_file(out, (json.dumps(value, indent=1) + "\n").encode(), is_locked=False)
        except OSError as e:
            raise ConfigError(f"--out {out} cannot be written: {e.strerror or e}.") from None


def _check_place(out: Path) -> None:
    try:
        check_own_result(out, "fingerprint")
    except ValueError as e:
        raise ConfigError(f"--out {out} cannot be written: {e}. Name another file.") from None
    except OSError as e:
        raise ConfigError(f"--out {out} cannot be written: {e.strerror or e}.") from None


def _show(runs: list[dict[str, Any]], methods: tuple[str, ...], means: dict[str, dict[str, float]]) -> None:
    """A table: layers down, methods across, recall@8/16/24 in each cell, means over seeds."""
    click.echo(f"{'layer':<8}" + "".join(f"{method:>20}" for method in methods) + f"    recall@{'/'.join(map(str, RECALL_AT))}")
    cell = "{0:.3f} {1:.3f} {2:.3f}"
    for i, first in enumerate(runs[0]["layers"]):
        values = {m: [np.mean([run["layers"][i][m][f"recall@{k}"] for run in runs]) for k in RECALL_AT] for m in methods}
        click.echo(f"{first['layer']:<8}" + "".join(f"{cell.format(*values[m]):>20}" for m in methods))
    click.echo(f"{'mean':<8}" + "".join(f"{cell.format(*(means[m][f'recall@{k}'] for k in RECALL_AT)):>20}" for m in methods))
