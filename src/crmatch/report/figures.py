"""The paper's figures, drawn with matplotlib: t-SNE, training curves, error over the threshold, the toy of Figure 1."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from crmatch.analysis.curves import PSEUDO_LABEL_CURVES, Points, Summary
from crmatch.atomic_files import write_file
from crmatch.errors import RequestError

if TYPE_CHECKING:
    from crmatch.analysis.embedding import Embedding
    from crmatch.analysis.toy import Mode, Toy

COLORS = ("#256abf", "#c2500d", "#1d7f5f", "#8a3fa8", "#56606d", "#b3266b", "#7a6a00", "#0d7d94")
GRAY = "#b8bcc2"
CURVE_TITLES = ("Error of all pseudo-labels, %", "Error of contributing images, %", "Share of contributing images, %")
TOY_TITLES: dict[Mode, str] = {
    "none": "no feature distance",
    "pull": "pulled together (CR-Inv)",
    "push": "pushed apart (CR-Equiv)",
}


def draw_curves(runs: Mapping[str, Mapping[str, Points]], out: Path) -> None:
    """The paper's three curves, one above the other; `runs` maps a run's name to its curves."""
    figure = Figure(figsize=(7, 8), layout="constrained")
    panels = figure.subplots(len(PSEUDO_LABEL_CURVES), 1, sharex=True)
    for panel, key, title in zip(panels, PSEUDO_LABEL_CURVES, CURVE_TITLES, strict=True):
        for place, (name, curves) in enumerate(runs.items()):
            steps, values = zip(*curves[key], strict=True) if key in curves else ((), ())
            panel.plot(steps, values, color=COLORS[place % len(COLORS)], label=name, linewidth=1.6)
        _finish(panel, title)
    panels[-1].set_xlabel("training steps")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=9, frameon=False)
    _save(figure, out)


def draw_threshold(errors: Mapping[float, Summary], title: str, out: Path) -> None:
    """Test error over the confidence threshold, with standard deviations over splits and seeds."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    panel = figure.subplots()
    summaries = list(errors.values())
    means, deviations = [one.mean for one in summaries], [one.std for one in summaries]
    panel.errorbar(list(errors), means, yerr=deviations, color=COLORS[0], marker="o", capsize=3, linewidth=1.6)
    counts = sorted({one.n for one in summaries})
    panel.set(xlabel="confidence threshold", ylabel="test error, %")
    _finish(panel, f"{title}, n = {' to '.join(map(str, counts[:: max(len(counts) - 1, 1)]))}")
    _save(figure, out)


def draw_embedding(embedding: Embedding, out: Path) -> None:
    """t-SNE of several models side by side; points have the colors of their classes, gray for unknown classes."""
    count = len(embedding.points)
    figure = Figure(figsize=(4.6 * count, 5.2), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    names = embedding.class_names
    palette = colormaps["tab10" if len(names) <= 10 else "turbo"]
    shades = [palette(place if len(names) <= 10 else place / (len(names) - 1)) for place in range(len(names))]
    for panel, points, title in zip(panels, embedding.points, embedding.titles, strict=True):
        unknown = embedding.labels < 0
        panel.scatter(*points[unknown].T, s=6, color=GRAY)
        for place, shade in enumerate(shades):
            panel.scatter(*points[embedding.labels == place].T, s=9, color=shade, linewidths=0)
        panel.set_title(title, fontsize=10)
        panel.set(xticks=[], yticks=[])
    if len(names) <= 20:
        handles = [
            # matplotlib would read `$` as mathematics and hide names that begin with `_`.
            Line2D([], [], marker="o", linestyle="", color=shade, label=f" {name}".replace("$", r"\$"))
            for name, shade in zip(names, shades, strict=True)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(names), 5 * count), fontsize=9, frameon=False)
    _save(figure, out)


def draw_teaser(toys: Mapping[Mode, Toy], errors: Mapping[Mode, Summary], out: Path) -> None:
    """Features of the toy: circles are weak views, stars are strong views, colors are classes; with the decision boundary."""
    figure = Figure(figsize=(4 * len(toys), 4.4), layout="constrained")
    for panel, (mode, toy) in zip(figure.subplots(1, len(toys)), toys.items(), strict=True):
        every = np.concatenate([toy.weak, toy.strong])
        margin = 0.06 * np.ptp(every, axis=0)
        limits = np.stack([every.min(axis=0) - margin, every.max(axis=0) + margin], axis=1)
        panel.set(xlim=limits[0], ylim=limits[1])
        for label, color in enumerate(COLORS[:2]):
            of_class = toy.labels == label
            panel.scatter(*toy.strong[of_class].T, marker="*", s=26, color=color, alpha=0.45, linewidths=0)
            panel.scatter(*toy.weak[of_class].T, marker="o", s=13, color=color, edgecolors="white", linewidths=0.4)
        a, b, c = toy.boundary.tolist()
        if square := a * a + b * b:
            x, y = -a * c / square, -b * c / square  # the point of a x + b y + c = 0 nearest to the origin
            panel.axline((x, y), (x - b, y + a), color="black", linewidth=1.4)
        error = f"test error {errors[mode].mean:.1f} ± {errors[mode].std:.1f} %, n = {errors[mode].n}"
        panel.set_title(f"{TOY_TITLES[mode]}\n{error}", fontsize=10)
        panel.set(xticks=[], yticks=[])
    shapes = {"weak view": "o", "strong view": "*"}
    handles = [Line2D([], [], marker=marker, linestyle="", color=COLORS[4], label=name) for name, marker in shapes.items()]
    handles.append(Line2D([], [], color="black", label="decision boundary"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    _save(figure, out)


def _finish(panel: Axes, title: str) -> None:
    panel.set_title(title, loc="left", fontsize=11)
    panel.set_ylim(bottom=0)
    panel.grid(color="#e4e4e0", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, out: Path) -> None:
    """Write the figure in the format of its extension."""
    kind = out.suffix[1:].lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise RequestError(f"--out {out} has no known picture format.\nUse .png, .svg or .pdf.")
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format=kind)
    write_file(out, file.getvalue())
