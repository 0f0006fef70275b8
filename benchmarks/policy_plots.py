#!/usr/bin/env python3
"""Draws what bench_policy.py found: hit rate over tokens for each policy, one PNG for each kind of routing, into docs/.

    policy_plots.py benchmarks/results/<machine>/<date>-<commit>-policy-policy.json
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import common
import matplotlib
import numpy as np
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

CURVES = {"belady": "Belady (knows the future)", "frequency-48": "use counts, half-life 48", "frequency-512": "use counts, half-life 512", "lru": "LRU", "static": "static, from a profile"}
COLOURS = ("#888888", "#0b6e4f", "#d1495b", "#30638e", "#edae49")
WINDOW, SMOOTH = 64, 4  # tokens of a value, values of a mean


def smoothed(values: list[float | None]) -> np.ndarray:
    """Running mean over SMOOTH values, shorter at the start."""
    series = np.array([np.nan if v is None else v for v in values])
    return np.array([np.nanmean(series[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(series))])


def draw(name: str, shares: dict[str, dict[str, dict[str, list[float | None]]]], path: Path) -> None:
    """A panel for each share of the experts in fast slots."""
    figure, axes = plt.subplots(1, len(shares), figsize=(11, 3.4), dpi=90, sharex=True, layout="constrained")
    for axis, (share, policies) in zip(axes, shares.items()):
        for (key, label), colour in zip(CURVES.items(), COLOURS):
            values = smoothed(policies[key]["over_time"])
            axis.plot((np.arange(len(values)) + 1) * WINDOW, 100 * values, label=label, color=colour, linewidth=1.3)
        axis.set_title(f"{100 * float(share):.0f} % of the experts in fast slots", fontsize=9)
        axis.set_xlabel("tokens decoded", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("expert uses in a fast slot, %", fontsize=8)
    figure.suptitle(name, fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.canvas.draw()
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    image.quantize(32).save(path, optimize=True)  # a third of what matplotlib writes
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, default=common.ROOT / "docs")
    args = parser.parse_args()
    found = json.loads(args.result.read_text())["results"]["policy"]
    titles = {
        "demo": "Demo model, held-out text of four domains in turns",
        "limit": "Benchmark model, text it samples on seven of its 64 topics",
        "synthetic-500": "Synthetic, 40 layers of 256 experts, a new topic every 500 tokens",
        "synthetic-4000": "Synthetic, 40 layers of 256 experts, a new topic every 4000 tokens",
    }
    for name, title in titles.items():
        shares = {key.split()[1]: value for key, value in found.items() if key.split()[0] == name}
        path = args.out / f"policy-{name}.png"
        draw(title, shares, path)
        common.progress(f"wrote {path.name}, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
