"""The figure of a run: one time axis, the demo's actions on top, decisions as they took effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetkeeper_contract.tiers import TIER_LABELS
from fleetkeeper_local.demo.record import seconds_of
from fleetkeeper_local.demo.recorder import EVERY_S, Observation, Points, points_of, ready_of
from fleetkeeper_local.load.open_loop import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOAD, FAULT = "load", "fault"
BREAKERS = ("control", "source", "standard", "batch")
BREAKER_NAMES = {"source": "Prometheus"}
COLOURS = {"realtime": "#b03a2e", "standard": "#1f618d", "batch": "#7d8b2f"}
INK, BLUE, FAULT_COLOUR, LOAD_COLOURS = "#222222", "#1f618d", "#c0392b", ("#dfe7ee", "#f6d8a8")
STATES = {0.0: "#e8f0e8", 0.5: "#f0b429", 1.0: "#c0392b"}
WIDTH_IN, HEIGHT_IN, DPI = 11.0, 12.5, 110
HEIGHTS = (0.85, 1.1, 1.1, 1.1, 1.1, 1.1, 0.9, 1.0)
BIN_S = 5.0
GAP_S = 3.0 * EVERY_S
COVERAGE = ("signal_coverage_ratio", ())


@dataclass(frozen=True, slots=True)
class Span:
    """A period of a run, in seconds of the wall clock: a stage of the load, or a fault."""

    begin_s: float
    end_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """The data of the figure. Samples count from `start_s`; other times are wall clock times."""

    title: str
    start_s: float
    end_s: float
    spans: Sequence[Span]
    observations: Sequence[Observation]
    decisions: Sequence[Mapping[str, Any]]
    samples: Sequence[Sample]

    def points(self, name: str, **labels: str) -> Points:
        """Return a gauge of the control loop, with gaps while no operator led."""
        return gapped(points_of(self.observations, self.start_s, name, **labels), GAP_S)

    def signal(self, name: str) -> Points:
        """Return a signal, with gaps while no replica's signals were usable: it is 0 then."""
        observations = [
            observation for observation in self.observations if observation.gauges.get(COVERAGE)
        ]
        return gapped(points_of(observations, self.start_s, name), GAP_S)


def gapped(points: Sequence[tuple[float, float]], gap_s: float) -> Points:
    """Return the points, with a NaN in each gap longer than `gap_s`, so that no line crosses it."""
    drawn: list[tuple[float, float]] = []
    for at_s, value in points:
        if drawn and at_s - drawn[-1][0] > gap_s:
            drawn.append((drawn[-1][0] + 1e-3, nan))
        drawn.append((at_s, value))
    return tuple(drawn)


def spread(times_s: Iterable[float], end_s: float, bin_s: float) -> Points:
    """Return the rate per second in bins of `bin_s`, at their middle; ignore later times."""
    counts = [0] * max(1, int(end_s // bin_s))
    for at_s in times_s:
        number = int(at_s // bin_s)
        if 0 <= number < len(counts):
            counts[number] += 1
    return tuple(((n + 0.5) * bin_s, count / bin_s) for n, count in enumerate(counts))


def steps_of(points: Points, end_s: float) -> list[tuple[float, float, float]]:
    """Return periods (begin, end, value) of constant value; a NaN ends one and starts none."""
    found: list[tuple[float, float, float]] = []
    for (begin, value), (end, _) in pairwise([*points, (end_s, nan)]):
        if isnan(value):
            continue
        if found and found[-1][1] == begin and found[-1][2] == value:
            found[-1] = (found[-1][0], end, value)
        else:
            found.append((begin, end, value))
    return found


def draw(run: Run, file: Path) -> None:
    """Write the figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - heavy
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(run.title, fontsize=12)
    axes = list(figure.subplots(len(HEIGHTS), 1, sharex=True, height_ratios=HEIGHTS))
    _strip(axes[0], run)
    for axis, panel in zip(
        axes[1:],
        (_requests, _first_token, _queue_wait, _batch_time, _sequences, _replicas, _breakers),
        strict=True,
    ):
        panel(axis, run)
        axis.grid(alpha=0.25)
        _shade(axis, run)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(
                loc="upper left", bbox_to_anchor=(1.0, 1.02), fontsize="x-small", frameon=False
            )
    axes[-1].set_xlabel("seconds since the load started")
    axes[-1].set_xlim(0, run.end_s - run.start_s)
    figure.align_ylabels(axes)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)


def _strip(axis: Axes, run: Run) -> None:
    """Draw the demo's actions: a row for the load, and one for each kind of fault."""
    faults = list(dict.fromkeys(span.text for span in run.spans if span.kind == FAULT))
    rows = ["load", *faults]
    stages = 0
    for span in run.spans:
        begin, length = span.begin_s - run.start_s, span.end_s - span.begin_s
        if span.kind == FAULT:
            axis.barh(rows.index(span.text), length, left=begin, height=0.6, color=FAULT_COLOUR)
            continue
        axis.barh(0, length, left=begin, height=0.9, color=LOAD_COLOURS[stages % 2])
        axis.text(begin + length / 2, 0, span.text, ha="center", va="center", fontsize=9)
        stages += 1
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="both", length=0)
    for side in ("top", "right", "bottom", "left"):
        axis.spines[side].set_visible(False)


def _shade(axis: Axes, run: Run) -> None:
    """Draw faults as pale bands and load changes as lines through every panel."""
    for span in run.spans:
        begin, end = span.begin_s - run.start_s, span.end_s - run.start_s
        if span.kind == FAULT:
            axis.axvspan(begin, max(end, begin + 1.0), color=FAULT_COLOUR, alpha=0.08, linewidth=0)
        else:
            axis.axvline(begin, color="#808080", linewidth=0.8, linestyle=(0, (4, 3)))


def _line(axis: Axes, points: Points, label: str, colour: str, **style: Any) -> None:  # noqa: ANN401 - passed on
    if points:
        times, values = zip(*points, strict=True)
        axis.plot(times, values, label=label, color=colour, **{"linewidth": 1.4, **style})


def _requests(axis: Axes, run: Run) -> None:
    width_s = run.end_s - run.start_s
    sent = spread([s.intended_s for s in run.samples], width_s, BIN_S)
    answered = spread([s.ended_s for s in run.samples if s.outcome.ok], width_s, BIN_S)
    _line(axis, sent, "sent", INK)
    _line(axis, answered, "answered", "#27824a")
    axis.set_ylabel("requests\nper second")
    axis.set_ylim(bottom=0)


def _first_token(axis: Axes, run: Run) -> None:
    for tier in TIER_LABELS:
        chosen = [s for s in run.samples if s.arrival.tier == tier and s.first_token_s is not None]
        times = [s.intended_s for s in chosen]
        values = [max(1e-3, s.first_token_s or 0.0) for s in chosen]
        axis.plot(times, values, ".", markersize=2.2, color=COLOURS[tier], label=tier, alpha=0.6)
    axis.set_yscale("log")
    axis.set_ylabel("TTFT\nat the client, s")


def _queue_wait(axis: Axes, run: Run) -> None:
    _line(axis, run.points("objective_queue_wait_seconds"), "objective", INK, linestyle=":")
    _line(axis, run.signal("signal_queue_wait_seconds"), "measured", BLUE)
    axis.set_yscale("log")
    axis.set_ylabel("queue wait, s")


def _batch_time(axis: Axes, run: Run) -> None:
    objective, measured = (
        tuple((at_s, 1e3 * value) for at_s, value in points)
        for points in (
            run.points("objective_batch_time_seconds"),
            run.signal("signal_batch_time_seconds"),
        )
    )
    _line(axis, objective, "objective", INK, linestyle=":")
    _line(axis, measured, "mean step time", BLUE)
    axis.set_ylabel("batch time, ms")
    axis.set_ylim(bottom=0)


def _sequences(axis: Axes, run: Run) -> None:
    limit = run.points("decision_limit_sequences")
    _line(axis, run.signal("signal_running"), "running, all replicas", "#8e9aa6", linewidth=1.0)
    _line(axis, limit, "limit per replica", BLUE, drawstyle="steps-post")
    changes = [row for row in run.decisions if row["what"] == "limits"]
    _marks(axis, run, changes, [float(str(row.get("to", "0")).split("/")[0]) for row in changes])
    axis.set_ylabel("sequences\nin a batch")
    axis.set_ylim(0, 1.4 * max((value for _, value in limit if not isnan(value)), default=1.0))


def _replicas(axis: Axes, run: Run) -> None:
    allocated = run.points("decision_replicas", kind="allocated")
    _line(axis, allocated, "allocated", INK, drawstyle="steps-post")
    ready = ready_of(run.observations, run.start_s)
    _line(axis, ready, "ready", "#27824a", drawstyle="steps-post", linestyle="--")
    changes = [row for row in run.decisions if row["what"] == "replicas"]
    _marks(axis, run, changes, [float(row.get("to") or 0) for row in changes])
    axis.set_ylabel("replicas")
    most = max((value for _, value in (*allocated, *ready) if not isnan(value)), default=1.0)
    axis.set_yticks(range(0, int(most) + 1, max(1, int(most) // 5)))
    axis.set_ylim(0, most + 0.9)


def _marks(
    axis: Axes, run: Run, changes: Sequence[Mapping[str, Any]], values: Sequence[float]
) -> None:
    """Draw a triangle at each decision, with its change."""
    for number, (row, value) in enumerate(zip(changes, values, strict=True)):
        at_s = seconds_of(str(row["time"])) - run.start_s
        axis.plot([at_s], [value], "v", color="#d35400", markersize=6, zorder=5)
        axis.annotate(
            f"{row.get('from', '')} \u2192 {row.get('to', '')}",
            (at_s, value),
            xytext=(0, 6 if number % 2 else 14),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color="#a04000",
        )


def _breakers(axis: Axes, run: Run) -> None:
    """Draw a row per breaker: pale closed, amber half-open, red open, empty if none led."""
    end_s = run.end_s - run.start_s
    for row, name in enumerate(reversed(BREAKERS)):
        points = run.points("breaker_state", breaker=name)
        for begin, end, state in steps_of(points, end_s):
            axis.barh(row, end - begin, left=begin, height=0.7, color=STATES[state])
    axis.set_yticks(
        range(len(BREAKERS)), [BREAKER_NAMES.get(name, name) for name in reversed(BREAKERS)]
    )
    axis.set_ylabel("breakers")
    for state, label in ((0.0, "closed"), (0.5, "half-open"), (1.0, "open")):
        axis.barh(0, 0, color=STATES[state], label=label)
    axis.set_ylim(-0.6, len(BREAKERS) - 0.4)
