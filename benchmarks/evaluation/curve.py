"""Draw attainment against GPU-hours: one panel by scene, every autoscaler, and attainmentPercent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pages import ENOUGH
from play import ALTERNATIVES, Case, Figures, Job, key_of

COLUMNS = 4
LOWEST = 0.6
INK, OURS, WAITING, CONCURRENCY = "#222222", "#1f618d", "#c39bd3", "#9aa5ab"


def draw(
    names: Sequence[str], seeds: Sequence[int], results: Mapping[str, Figures], file: Path
) -> None:
    """Write the figure as PNG. Attainments below 60% are drawn at 60%; a scene without runs stays empty."""
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(11.0, 2.35 * rows + 0.7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for panel, name in zip(axes, names, strict=False):
        for kind, colour, marker in (
            ("hpa-concurrency", CONCURRENCY, "o"),
            ("hpa-waiting", WAITING, "s"),
        ):
            points = [
                _middle(runs)
                for case in ALTERNATIVES
                if case.kind == kind and (runs := _runs(name, seeds, results, case))
            ]
            panel.scatter(
                *_columns(points), s=22, c=colour, marker=marker, linewidths=0, label=kind
            )
        panel.set_title(name, fontsize=9, loc="left")
        ours = _runs(name, seeds, results, Case())
        if not ours:
            continue
        single = [(run.gpu_hours, max(LOWEST, run.attainment)) for run in ours]
        panel.scatter(*_columns(single), s=14, facecolors="none", edgecolors=OURS, linewidths=0.8)
        panel.scatter(*_columns([_middle(ours)]), s=55, c=OURS, marker="D", label="Fleetkeeper")
        panel.axhline(ENOUGH, color=INK, linewidth=0.6, linestyle=":")
        panel.set_ylim(LOWEST - 0.015, 1.015)
        panel.set_xlim(0.0, 1.08 * panel.dataLim.x1)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panel.tick_params(labelsize=7)
    for panel in axes[len(names) :]:
        panel.set_axis_off()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.supxlabel("GPU-hours", fontsize=9)
    figure.supylabel("SLO attainment", fontsize=9)
    figure.savefig(file)


def _runs(
    name: str, seeds: Sequence[int], results: Mapping[str, Figures], case: Case
) -> list[Figures]:
    keys = [key_of(Job(name, seed, case)) for seed in seeds]
    return [results[key] for key in keys if key in results]


def _middle(runs: Sequence[Figures]) -> tuple[float, float]:
    """Return the medians of GPU-hours and attainment."""
    hours = float(median([run.gpu_hours for run in runs]))
    return hours, max(LOWEST, float(median([run.attainment for run in runs])))


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
