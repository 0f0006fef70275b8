"""A picture of a routing profile. Needs matplotlib, which the extra "plot" installs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .routing_profile import RoutingProfile, skew


def relative_uses(profile: RoutingProfile) -> np.ndarray:
    """Uses of each expert relative to the average of its layer, float64 [n_layer, most experts of a layer]; NaN where a layer
    has fewer experts, or no uses."""
    table = np.full((len(profile.counts), max(profile.shape.values(), default=0)), np.nan)
    for row, values in enumerate(profile.counts.values()):
        if values.any():
            table[row, : len(values)] = values / values.mean()
    return table


def plot_profile(profile: RoutingProfile, path: Path, title: str) -> None:
    """Writes a heat map, one row for each layer: experts by number, and experts by use with the marks of half and 90 % of
    the uses. The suffix of `path` names the format, PNG and others. Raises ImportError without matplotlib, OSError when the
    file cannot be written, ValueError for an unknown format or a profile without uses."""
    if profile.is_empty:
        raise ValueError("it has no uses yet")
    if not path.suffix:  # matplotlib would add one, to a name that was not given
        raise ValueError("its name needs a suffix that says the format, such as .png")
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    table = relative_uses(profile)
    ranked = -np.sort(-table, axis=1)  # NaN stays last
    figure = Figure(figsize=(12, max(3.0, 1.8 + 0.16 * len(table))), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, sharey=True)
    norm = LogNorm(vmin=0.1, vmax=max(10.0, float(np.nanmax(table))), clip=True)
    for axes, values, label in ((left, table, "expert"), (right, ranked, "experts of the layer, most used first")):
        image = axes.imshow(values, aspect="auto", norm=norm, cmap="inferno", interpolation="nearest")
        axes.set_xlabel(label)
    rows = np.arange(len(table))
    layers = skew(profile)
    for share, colour in (("half", "white"), ("ninety", "cyan")):
        right.step([getattr(layer, share) - 0.5 for layer in layers], rows, color=colour, where="mid", linewidth=1)
    right.set_title("left of the white line: half of the uses; left of the blue line: 90 %", fontsize="small")
    step = -(-len(rows) // 40)
    left.set_yticks(rows[::step], [str(layer.layer) for layer in layers][::step])
    left.set_ylabel("block")
    figure.colorbar(image, ax=[left, right], label="uses, relative to the layer's average")
    figure.savefig(path, dpi=110)
