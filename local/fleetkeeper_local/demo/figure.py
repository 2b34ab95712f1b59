"""The figure of a run: six panels over one time axis, decisions as marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from fleetkeeper_local.demo.record import OURS, Moment
from fleetkeeper_local.demo.series import STEP_S, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (
    ("arrivals", "requests/s"),
    ("queue wait", "queue wait, s"),
    ("batch time", "batch time, s"),
    ("limits", "sequences"),
    ("replicas", "replicas"),
    ("breakers", "breakers"),
)
STEPPED = frozenset({"limits", "replicas", "breakers"})
COLOURS = {
    "realtime": "#b03a2e",
    "standard": "#1f618d",
    "batch": "#7d8b2f",
    "control": "#111111",
    "source": "#b9770e",
}
WIDTH_IN, HEIGHT_IN = 11.0, 12.0
DPI = 130
GAP_S = 3.0 * STEP_S
LABEL_ROOM_S = 7.0
"""Words closer together than this would cover each other."""
LABEL_CHARACTERS = 32


def draw(
    panels: Mapping[str, Sequence[Series]], moments: Sequence[Moment], start_s: float, file: Path
) -> None:
    """Writes the figure as PNG.

    Args:
        panels: lines by panel, as `series.queries` names them.
        moments: what is marked; those without a label are not.
        start_s: the zero of the time axis.
        file: where to.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - heavy
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(PANELS), 1, sharex=True)
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        _panel(axis, name, panels.get(name, ()))
        for line in panels.get(f"objective {name}", ()):
            _line(axis, line, "objective", colour="black", style=":", stepped=True)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        axis.margins(x=0)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(loc="upper right", fontsize="x-small", ncols=4)
    axes[-1].set_yticks([0, 0.5, 1], ["closed", "half open", "open"])
    axes[-1].set_ylim(-0.05, 1.3)
    axes[-1].set_xlabel("seconds after the load began")
    _marks(list(axes), moments, start_s)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)


def _panel(axis: Axes, name: str, lines: Sequence[Series]) -> None:
    for line in sorted(lines, key=lambda line: line.name):
        _line(axis, line, line.name or "mean", COLOURS.get(line.name), stepped=name in STEPPED)
    if name in {"queue wait", "batch time"} and any(line.points for line in lines):
        axis.set_yscale("log")
    elif name != "breakers":
        axis.set_ylim(bottom=0)


def _line(
    axis: Axes,
    line: Series,
    label: str,
    colour: str | None = None,
    style: str = "-",
    *,
    stepped: bool = False,
) -> None:
    if not line.points:
        return
    times, values = zip(*with_gaps(line.points), strict=True)
    axis.plot(
        times,
        values,
        label=label,
        color=colour,
        linestyle=style,
        linewidth=1.3,
        drawstyle="steps-post" if stepped else "default",
    )


def with_gaps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, with a NaN where nothing was measured for a while: no line is drawn across."""
    drawn: list[tuple[float, float]] = []
    for at_s, value in points:
        if drawn and at_s - drawn[-1][0] > GAP_S:
            drawn.append((at_s, nan))
        drawn.append((at_s, value))
    return drawn


def _marks(axes: list[Axes], moments: Sequence[Moment], start_s: float) -> None:
    """A line at each moment; words above the first panel where there is room for them."""
    last_s = -LABEL_ROOM_S
    for moment in (m for m in moments if m.label):
        at_s = moment.at_s - start_s
        colour = "#922b21" if moment.who == OURS else "#566573"
        for axis in axes:
            axis.axvline(at_s, color=colour, linewidth=0.7, alpha=0.6)
        if at_s - last_s < LABEL_ROOM_S and moment.who != OURS:
            continue
        last_s = at_s
        axes[0].annotate(
            shorten(moment.label, LABEL_CHARACTERS, placeholder="…"),
            (at_s, 1.03),
            xycoords=("data", "axes fraction"),
            rotation=60,
            rotation_mode="anchor",
            fontsize=7,
            color=colour,
            annotation_clip=False,
        )
