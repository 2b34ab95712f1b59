"""Draw the chart's dashboards as pictures, from a Prometheus or from a record of its answers.

For example: scripts/draw_dashboards.py --prometheus http://127.0.0.1:9090 --namespace team-a --service chat
Grafana is not needed. --save keeps the answers, and --record draws them again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from requests import RequestException, Session

from panel_text import scale_of, series_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "charts/fleetkeeper/files/dashboards"
PICTURES = ROOT / "docs/img"
POINTS = 240
"""Of each series, at most."""
DAY_S = 86_400.0
"""Times are days since 1970 in matplotlib."""
COLUMNS, COLUMN_IN, LINE_IN, HEAD_IN, DPI = 24, 0.56, 0.34, 0.55, 100
LEFT_IN, RIGHT_IN, TOP_IN, GAP_IN, LEGEND_LINE_IN = 0.72, 0.28, 0.4, 0.05, 0.17
LEGEND_LINES = 3
CHARACTER_IN = 0.053
PAGE, INK, PALE, EDGE = "#f4f5f5", "#24292e", "#6e7680", "#dcdee0"
COLORS = ("#56a64b", "#3274d9", "#ff780a", "#e02f44", "#a352cc", "#e0b400", "#37a2b5", "#8f3bb8")

Series = dict[str, Any]
"""As Prometheus returns it: `metric` with the labels, `values` with times and texts."""


@dataclass(frozen=True)
class Record:
    """The answers of Prometheus to all panels: the series by query."""

    start: float
    end: float
    step: float
    values: Mapping[str, str]
    answers: Mapping[str, list[Series]]


def load_dashboards() -> dict[str, dict[str, Any]]:
    """Return the shipped dashboards by the name of their files."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}


def panels_of(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels with data."""
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def queries_of(dashboard: Mapping[str, Any]) -> Iterator[str]:
    """Yield the queries of all panels, and those of the annotations."""
    for panel in panels_of(dashboard):
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["expr"] for each in dashboard["annotations"]["list"])


def replaced(query: str, values: Mapping[str, str]) -> str:
    """Return the query with values for Grafana's variables.

    Raises:
        ValueError: a variable has no value.
    """
    for name, value in values.items():
        query = query.replace(f"${name}", value)
    if "$" in query:
        raise ValueError(f"a variable has no value: {query}")
    return query


def record(
    url: str,
    dashboards: Sequence[Mapping[str, Any]],
    values: Mapping[str, str],
    start: float,
    end: float,
) -> Record:
    """Ask a Prometheus for the data of all panels."""
    step = max(1.0, round((end - start) / POINTS))
    begin, finish = (datetime.fromtimestamp(at, UTC) for at in (start, end))
    with Session() as session:
        client = PrometheusConnect(url, session=session)
        answers = {
            query: client.custom_query_range(query, begin, finish, str(step))
            for dashboard in dashboards
            for each in queries_of(dashboard)
            for query in [replaced(each, values)]
        }
    return Record(start, end, step, values, answers)


def draw(dashboard: Mapping[str, Any], data: Record) -> Figure:
    """Return a dashboard as a figure: its panels at their places in the grid."""
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    width, height = COLUMNS * COLUMN_IN, lines * LINE_IN + HEAD_IN
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAGE)
    FigureCanvasAgg(figure)
    page = figure.add_axes((0, 0, 1, 1), zorder=-1)
    page.set_xlim(0, width)
    page.set_ylim(height, 0)
    page.set_axis_off()
    page.text(0.12, 0.3, dashboard["title"], fontsize=14, weight="bold", color=INK, va="center")
    page.text(
        width - 0.12,
        0.3,
        _subtitle(dashboard, data),
        fontsize=9,
        color=PALE,
        va="center",
        ha="right",
    )
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        x, y = place["x"] * COLUMN_IN, place["y"] * LINE_IN + HEAD_IN
        wide, high = place["w"] * COLUMN_IN, place["h"] * LINE_IN
        if panel["type"] == "row":
            page.text(x + 0.12, y + high / 2, panel["title"], fontsize=11, color=INK, va="center")
            continue
        page.add_patch(
            Rectangle(
                (x + GAP_IN, y + GAP_IN), wide - 2 * GAP_IN, high - 2 * GAP_IN,
                facecolor="white", edgecolor=EDGE, linewidth=0.8,
            )
        )  # fmt: skip
        page.text(
            x + 0.15, y + 0.21, panel["title"], fontsize=9, weight="bold", color=INK, va="center"
        )
        axes = _panel(figure, (x, y, wide, high), panel, data)
        marks = [at / DAY_S for at in _marks(dashboard, data)]
        over = axes.get_xaxis_transform()
        axes.vlines(marks, 0, 1, PALE, "dotted", linewidth=0.7, transform=over)
    return figure


def _marks(dashboard: Mapping[str, Any], data: Record) -> Iterator[float]:
    """Yield when results of the annotations begin."""
    for each in dashboard["annotations"]["list"]:
        for series in data.answers.get(replaced(each["expr"], data.values), []):
            last = -math.inf
            for at, _ in series["values"]:
                if at - last > 1.5 * data.step:
                    yield at
                last = at


def _subtitle(dashboard: Mapping[str, Any], data: Record) -> str:
    names = [item["name"] for item in dashboard["templating"]["list"]]
    chosen = [f"{name}: {data.values[name]}" for name in names if name in data.values]
    begin, end = (datetime.fromtimestamp(at, UTC) for at in (data.start, data.end))
    return "   ".join([*chosen, f"{begin:%Y-%m-%d %H:%M} to {end:%H:%M} UTC"])


def _panel(
    figure: Figure, place: tuple[float, float, float, float], panel: Mapping[str, Any], data: Record
) -> Axes:
    x, y, wide, high = place
    found = list(_series(panel, data))
    columns, texts = _legend([name for name, _ in found], wide)
    below = 0.42 + LEGEND_LINE_IN * -(-max(1, len(texts)) // columns)
    page_wide, page_high = figure.get_size_inches()
    axes = figure.add_axes(
        (
            (x + LEFT_IN) / page_wide,
            1 - (y + high - below) / page_high,
            (wide - LEFT_IN - RIGHT_IN) / page_wide,
            (high - TOP_IN - below) / page_high,
        )
    )
    drawn = [_line(axes, index, points, data) for index, (_, points) in enumerate(found)]
    _dress(axes, panel["fieldConfig"]["defaults"], data)
    if not found:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", color=PALE)
        return axes
    axes.legend(
        drawn[: len(texts)], texts, ncols=columns, loc="upper left",
        bbox_to_anchor=((x + 0.2) / page_wide, 1 - (y + high - below + 0.24) / page_high),
        bbox_transform=figure.transFigure, frameon=False, fontsize=7, labelcolor=INK,
        handlelength=1.2, handletextpad=0.5, columnspacing=1.2, borderpad=0, borderaxespad=0,
        labelspacing=0.35,
    )  # fmt: skip
    return axes


def _series(
    panel: Mapping[str, Any], data: Record
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield name and points of every series, by name within a query."""
    for target in panel["targets"]:
        answer = data.answers.get(replaced(target["expr"], data.values), [])
        named = [(series_name(target["legendFormat"], each["metric"]), each) for each in answer]
        for name, each in sorted(named, key=lambda pair: pair[0]):
            yield name, [(float(at), float(value)) for at, value in each["values"]]


def _legend(names: Sequence[str], wide: float) -> tuple[int, list[str]]:
    """Return the number of columns and the texts that fit under a panel."""
    longest = max((len(name) for name in names), default=1)
    columns = max(1, int((wide - 0.3) / (0.4 + CHARACTER_IN * longest)))
    columns = min(columns, max(1, len(names)))
    room = columns * LEGEND_LINES
    if len(names) <= room:
        return columns, list(names)
    return columns, [*names[: room - 1], f"and {len(names) - room + 1} more"]


def _line(axes: Axes, index: int, points: Sequence[tuple[float, float]], data: Record) -> Any:  # noqa: ANN401 - matplotlib's
    """Draw one series, with a gap where samples are missing."""
    times: list[float] = []
    values: list[float] = []
    last = points[0][0]
    for at, value in points:
        if at - last > 1.5 * data.step:
            times.append((last + data.step) / DAY_S)
            values.append(float("nan"))
        times.append(at / DAY_S)
        values.append(value)
        last = at
    color = COLORS[index % len(COLORS)]
    style = "-" if index < len(COLORS) else "--"
    (line,) = axes.plot(times, values, style, color=color, linewidth=1.1)
    axes.fill_between(times, values, color=color, alpha=0.08, linewidth=0)
    return line


def _dress(axes: Axes, defaults: Mapping[str, Any], data: Record) -> None:
    """Set limits, grid and labels."""
    axes.set_xlim(data.start / DAY_S, data.end / DAY_S)
    if not axes.dataLim.y1 > 0:  # nothing but zeros, or no number at all
        axes.set_ylim(0.0, 1.0)
    axes.set_ylim(bottom=defaults.get("min"))
    low, high = axes.get_ylim()
    size, name = scale_of(defaults["unit"], high)
    ticks = [
        tick
        for tick in MaxNLocator(4).tick_values(low / size, high / size)
        if low <= tick * size <= high
    ]
    axes.set_yticks([tick * size for tick in ticks], [f"{tick:.4g}{name}" for tick in ticks])
    axes.xaxis.set_major_locator(AutoDateLocator(minticks=3, maxticks=6))
    short = data.end - data.start < 300
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S" if short else "%H:%M", tz=UTC))
    axes.tick_params(labelsize=7, colors=PALE, length=0, pad=5)
    axes.grid(color=EDGE, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main() -> None:
    """Draw all dashboards."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prometheus", help="URL of the Prometheus to ask")
    source.add_argument("--record", type=Path, help="answers that --save wrote")
    parser.add_argument("--save", type=Path, help="write the answers of Prometheus to this file")
    parser.add_argument("--namespace", default=".*", help="namespace of the services")
    parser.add_argument("--service", default="", help="the service of the dashboard Service")
    parser.add_argument("--operator", default=".*", help="namespace of the operator")
    parser.add_argument("--rate-interval", default="1m", help="value of $__rate_interval")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the time range")
    parser.add_argument(
        "--end",
        type=datetime.fromisoformat,
        help="its end, as 2026-01-31T12:00:00+00:00; default: now",
    )
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the pictures")
    asked = parser.parse_args()
    dashboards = load_dashboards()
    if asked.record:
        data = Record(**json.loads(asked.record.read_text()))
    else:
        end = (asked.end or datetime.now(UTC)).timestamp()
        values = {
            "__rate_interval": asked.rate_interval,
            "namespace": asked.namespace,
            "service": asked.service,
            "operator": asked.operator,
        }
        start = end - 60.0 * asked.minutes
        try:
            data = record(asked.prometheus, list(dashboards.values()), values, start, end)
        except (RequestException, PrometheusApiClientException) as problem:
            sys.exit(
                f"--prometheus {asked.prometheus}: {problem}; give the URL of a Prometheus, as http://localhost:9090"
            )
    if asked.save:
        asked.save.write_text(json.dumps(asdict(data)))
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, dashboard in dashboards.items():
        file = asked.out / f"dashboard-{name}.png"
        draw(dashboard, data).savefig(file)
        print(file)


if __name__ == "__main__":
    main()
