"""The report as one page: tables and figures, without scripts and without other files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fleetkeeper.simulate.comparison import Result
from fleetkeeper.simulate.recorder import Moment
from fleetkeeper.simulate.report.figures import (
    LEFT,
    LOAD,
    RIGHT,
    WIDTH,
    Axis,
    Dot,
    Figure,
    Series,
    axis_to,
    known_values,
    log_axis,
)
from fleetkeeper.simulate.report.report import Report, seconds_text
from fleetkeeper.simulate.report.tables import tables_of

HARDWARE_WORDS = (
    ("t0", "t0_s", 1e3, "ms"),
    ("w", "w_s", 1e3, "ms"),
    ("g", "g_s", 1e6, "us/token"),
    ("b", "b_s", 1e6, "us/sequence"),
    ("c", "c_s", 1e9, "ns/KV token"),
)
ACRONYMS = frozenset({"SLO", "GPU", "TTFT", "TPOT", "CPU"})
STYLES = 8
"""Styles of series that the page defines; more series repeat them."""


def report_page(report: Report) -> str:
    """Return the page."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    pages.filters |= {"heading": heading, "px": "{:.1f}".format, "style": _style, "zip": zip}
    pages.globals |= {"width": WIDTH, "left": LEFT, "right": RIGHT}
    service, cost, *details, cpu = tables_of(report.results)
    wait_s, step_s = report.objectives_s
    page = pages.get_template("report.html").render(
        report=report,
        names=[result.name for result in report.results],
        service=service,
        cost=cost,
        details=details,
        cpu=cpu,
        scatter=_scatter(report),
        replicas=_replicas(report),
        limits=[
            _lines(report, "f-seq", "Limit of sequences", lambda m: m.limit_sequences),
            _lines(report, "f-tok", "Limit of tokens per step", lambda m: m.limit_tokens),
        ],
        times=[
            _lines(report, "f-wait", "Mean queue wait", lambda m: m.queue_wait_s, wait_s),
            _lines(report, "f-step", "Mean batch time", lambda m: m.batch_time_s, step_s),
        ],
        hardware=_hardware(report),
    )
    return page.lstrip()


def heading(title: str) -> str:
    """Return a column's title for the page: only acronyms stay in capitals."""
    words = [word if word in ACRONYMS else word.lower() for word in title.split(" ")]
    return " ".join([words[0][0].upper() + words[0][1:], *words[1:]]).replace(" /s", "/s")


def _style(number: int) -> str:
    """Return the class of a style in the page."""
    return "load" if number == LOAD else f"s{number % STYLES}"


def _plain(value: float) -> str:
    return f"{value:g}"


def _time_unit(report: Report) -> tuple[float, str]:
    return (3600.0, "h") if report.setting.seconds > 3 * 3600 else (60.0, "min")


def _time_axis(report: Report) -> Axis:
    unit_s, unit = _time_unit(report)
    return Axis(0.0, report.setting.seconds / unit_s, lambda value: f"{value:g} {unit}")


def _points(
    report: Report, result: Result, value: Callable[[Moment], float], *, until_end: bool = False
) -> list[tuple[float, float]]:
    """Return a figure over time. `until_end`: the last value holds until the end of the run."""
    unit_s, _ = _time_unit(report)
    points = [(moment.time_s / unit_s, value(moment)) for moment in result.moments]
    if points and until_end:
        points.append((report.setting.seconds / unit_s, points[-1][1]))
    return points


def _replicas(report: Report) -> Iterator[Figure]:
    """Yield the load, and for each alternative its replicas: wanted as a line, ready as an area."""
    time = _time_axis(report)
    load = _points(report, report.results[0], lambda moment: moment.requests_per_s)[1:]
    series = [Series("", LOAD, load, area=True), Series("requests/s", LOAD, load)]
    up = axis_to(max(known_values(series), default=1.0), _plain)
    yield Figure("f-load", "Requests per second (seed 1)", time, up, series, height=150)
    most = max([m.replicas for result in report.results for m in result.moments], default=1)
    ticks = min(3, most)
    for number, result in enumerate(report.results):
        ready = _points(report, result, lambda moment: moment.ready, until_end=True)
        wanted = _points(report, result, lambda moment: moment.replicas, until_end=True)
        yield Figure(
            f"f-replicas-{number}",
            f"{result.name}: replicas (line) and ready replicas (area)",
            time,
            axis_to(most, _plain, ticks),
            [
                Series("ready", number, ready, steps=True, area=True),
                Series("replicas", number, wanted, steps=True),
            ],
            height=100,
            ticks=ticks,
        )


def _lines(
    report: Report,
    number: str,
    title: str,
    value: Callable[[Moment], float],
    objective_s: float | None = None,
) -> Figure:
    """Return a figure with one line per alternative; with an objective, on a logarithmic axis."""
    series = [
        Series(result.name, style, _points(report, result, value), steps=objective_s is None)
        for style, result in enumerate(report.results)
    ]
    series.reverse()  # the first alternative is drawn over the others
    known = known_values(series)
    if objective_s is None:
        up = axis_to(max(known, default=1.0), lambda value: f"{value:,.0f}")
    else:
        up = log_axis([*known, objective_s], seconds_text)
    title = f"{title} (seed 1)"
    return Figure(number, title, _time_axis(report), up, series, objective=objective_s)


def _scatter(report: Report) -> Figure:
    dots = [
        Dot(result.name, number, result.figures["gpu_hours"], result.figures["slo_attainment"])
        for number, result in enumerate(report.results)
    ]
    across = axis_to(max([dot.across.most for dot in dots]), _plain)
    lowest = min([dot.up.least for dot in dots])
    step = 0.005 if lowest > 0.98 else 0.02 if lowest > 0.9 else 0.1
    low = max(0.0, step * math.floor(lowest / step - 1e-9))
    up = Axis(low, 1.0, lambda value: f"{100 * value:.3g}%")
    title = "SLO attainment (up) against GPU-hours (right): the upper left is best"
    return Figure("f-scatter", title, across, up, dots=dots, height=300, ticks=5)


def _hardware(report: Report) -> str:
    hardware = report.hardware
    numbers = ", ".join(
        f"{name} {getattr(hardware, field) * factor:.3g} {unit}"
        for name, field, factor, unit in HARDWARE_WORDS
    )
    return (
        f"Hardware {hardware.name}: {numbers}, kernels x {hardware.kernel_ratio:g}, "
        f"KV cache {hardware.kv_capacity_tokens:,.0f} tokens, cold start {hardware.cold_start_s:.0f} s (median). "
        f"Source: {hardware.source or 'not given'}."
    )
