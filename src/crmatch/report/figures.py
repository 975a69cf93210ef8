"""The paper's figures, drawn with matplotlib: t-SNE, training curves, error over the threshold, the toy of Figure 1."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
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
from crmatch.paper.verdicts import Results, claims_of

if TYPE_CHECKING:
    from crmatch.analysis.embedding import Embedding
    from crmatch.analysis.toy import Mode, Toy

COLORS = ("#256abf", "#c2500d", "#1d7f5f", "#8a3fa8", "#56606d", "#b3266b", "#7a6a00", "#0d7d94")
GRAY = "#b8bcc2"
VERDICT_COLORS = {"holds": "#1d7f5f", "does not hold": "#c2500d", "undecided": "#8a9099"}
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


def draw_forest(results: Sequence[Results], out: Path, topics: Sequence[str] = ()) -> None:
    """Every difference with its t interval: a line per claim, stacked if it has several, and a panel per setting.

    Claims of other topics and claims without runs are left out.
    """
    shown = [
        {one.claim: measured for one in of.tested if (measured := [f.estimate for f in one.findings if f.estimate.n])}
        for of in results
    ]
    claims = [claim for claim in claims_of(results) if any(claim in estimates for estimates in shown)]
    claims = [claim for claim in claims if not topics or claim.topic in topics]
    heights = [max(2, *(len(estimates.get(claim, ())) for estimates in shown)) for claim in claims]
    tops = [-sum(heights[:place]) for place in range(len(claims))]
    figure = Figure(figsize=(4.6 + 2.6 * len(results), 1 + 0.1 * sum(heights)), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for panel, of, estimates in zip(panels, results, shown, strict=True):
        for claim, top, height in zip(claims, tops, heights, strict=True):
            for place, one in enumerate(stack := estimates.get(claim, [])):
                y, color = top - (place + 0.5) * height / len(stack), VERDICT_COLORS[one.verdict]
                panel.plot(one.t or (one.mean, one.mean), [y, y], color=color, linewidth=1.3, solid_capstyle="butt")
                panel.plot(one.mean, y, "o", markersize=3.2, color=color, markerfacecolor=color if one.t else "white")
            panel.axhline(top, color="#e4e4e0", linewidth=0.6)
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_xscale("symlog", linthresh=1)
        panel.set_xticks([-30, -5, -1, 0, 1, 5, 30], labels=["−30", "−5", "−1", "0", "1", "5", "30"])
        panel.minorticks_off()
        panel.tick_params(labelsize=8, length=2)
        panel.tick_params(axis="y", length=0)
        counts = sorted({one.n for claim in claims for one in estimates.get(claim, ())}) or [0]
        panel.set_title(f"{of.plan.setting.name}, n = {' to '.join(map(str, counts[:: max(len(counts) - 1, 1)]))}", fontsize=9)
        panel.spines[["top", "right", "left"]].set_visible(False)
    middles = [top - height / 2 for top, height in zip(tops, heights, strict=True)]
    panels[0].set_yticks(middles, labels=[claim.text for claim in claims], fontsize=8)
    panels[0].set_ylim(-sum(heights), 0)
    handles = [Line2D([], [], marker="o", color=color, markersize=4, label=name) for name, color in VERDICT_COLORS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
    figure.supxlabel(
        "difference in percentage points (cosines: hundredths) with 95 % t interval; above 0 as claimed", fontsize=8
    )
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
