#!/usr/bin/env python3
"""Draws what bench_placement.py found, one PNG into docs/: hit rate over tokens for each placement and policy, and start-ups.

    placement_plots.py benchmarks/results/<machine>/<date>-<commit>-placement.json --name demo

Several results, of other --parts with the same settings, are drawn as one.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import matplotlib
import numpy as np
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ARMS = {"calibrated+ring": "calibrated + ring", "ring": "ring, no profile", "calibrated": "calibrated, static", "uniform": "uniform, static"}
COLOURS = ("#0b6e4f", "#d1495b", "#30638e", "#edae49", "#888888")
COLUMNS = 2
BOUND = {"belady": "Belady (knows the future)", "ring": "ring", "lru": "LRU"}
SMOOTH = 4  # points of a running mean
WINDOW = 64  # tokens of a value of a replay
Curve = list[tuple[float, float]]


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Running mean over SMOOTH values, shorter at the start."""
    series = np.array(values, dtype=float)
    return np.array([np.nanmean(series[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(series))])


def arm_curve(arm: dict[str, Any], n_warm: int) -> Curve:
    """(tokens, hit rate) of an arm of validate: intervals of the warm-up, then every request's mean at its end."""
    warm = arm["curve_of_warm_up"]
    points = list(zip([point["tokens"] for point in warm], smoothed([point["hit_rate"] for point in warm])))
    tokens = points[-1][0] if points else 0.0
    for request in arm["requests"][n_warm:]:
        tokens += request["tokens"] - 1
        points.append((tokens, request["hits"] / request["uses"]))
    return points


def start_curve(start: dict[str, Any]) -> Curve:
    return [(point["tokens"], point["hit_rate"]) for point in start["curve"]]


def panels(results: dict[str, Any]) -> list[tuple[str, dict[str, Curve]]]:
    """Title and curves of every panel for which there are figures."""
    found: list[tuple[str, dict[str, Curve]]] = []
    validated = results.get("validate")
    if validated:
        arms, settings = validated["results"]["arms"], validated["settings"]
        n_warm = -(-settings["warmup"] // settings["tokens"])
        found.append(("held-out requests, one after another", {label: arm_curve(arms[name], n_warm) for name, label in ARMS.items() if name in arms}))
    bound = results.get("bound")
    if bound:
        curves = {label: list(zip(WINDOW * np.arange(1, len(bound[name]["over_time"]) + 1), smoothed(bound[name]["over_time"]))) for name, label in BOUND.items()}
        found.append(("held-out text, replayed", curves))
    for policy, title in (("frequency", "first tokens of a start, ring"), ("static", "first tokens of a start, static")):
        curves = {}
        if "bootstrap" in results:
            curves |= {"after agent history": start_curve(results["bootstrap"][policy]["history"]), "no profile": start_curve(results["bootstrap"][policy]["bare"])}
        starts = results.get("restarts", {}).get("starts", [])
        for number, start in list(enumerate(starts, 1))[1:]:
            curves[f"start {number}, profile of {starts[number - 2]['profile_afterwards']['tokens']} tokens"] = start_curve(start["start_up"][policy])
        if curves:
            found.append((title, curves))
    return found


def draw(title: str, results: dict[str, Any], path: Path) -> None:
    shown = panels(results)
    n_rows = -(-len(shown) // COLUMNS)
    figure, axes = plt.subplots(n_rows, COLUMNS, figsize=(5 * COLUMNS, 3.8 * n_rows), dpi=90, layout="constrained", squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, (name, curves) in zip(axes.flat, shown):
        for (label, points), colour in zip(curves.items(), COLOURS):
            x, y = zip(*points)
            axis.plot(x, 100 * np.array(y), label=label, color=colour, linewidth=1.3)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("tokens", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.set_ylabel("expert uses in a fast slot, %", fontsize=8)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.canvas.draw()
    Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB").quantize(128).save(path, optimize=True)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="+")
    parser.add_argument("--name", required=True, help="docs/placement-NAME.png")
    parser.add_argument("--out", type=Path, default=common.ROOT / "docs")
    args = parser.parse_args()
    values = [json.loads(path.read_text()) for path in args.result]
    settings = values[0]["settings"]
    if any((value["settings"]["model"], value["settings"]["share"]) != (settings["model"], settings["share"]) for value in values):
        parser.error("these results are of different models or shares.")
    path = args.out / f"placement-{args.name}.png"
    results = {key: part for value in values for key, part in value["results"].items()}
    draw(f"{Path(settings['model']).name}, {settings['share']:g} % of the experts in fast slots", results, path)
    common.progress(f"wrote {path.name}, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
