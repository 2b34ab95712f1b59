"""The report as one page: tables and figures, without scripts and without other files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import resources

from fleetkeeper.simulate.comparison import Result
from fleetkeeper.simulate.recorder import Moment
from fleetkeeper.simulate.report import (
    COST,
    CPU,
    LATENCY,
    SERVICE,
    Column,
    Report,
    seconds_text,
    spread_text,
    value_text,
)
from fleetkeeper.simulate.report_batch import TITLES, batch_rows
from fleetkeeper.simulate.report_svg import (
    LOAD,
    Axis,
    Dot,
    Panel,
    Series,
    axis_to,
    log_axis,
    scatter_svg,
    style_name,
)

HARDWARE_WORDS = (
    ("t0", "t0_s", 1e3, "ms"),
    ("w", "w_s", 1e3, "ms"),
    ("g", "g_s", 1e6, "us/token"),
    ("b", "b_s", 1e6, "us/sequence"),
    ("c", "c_s", 1e9, "ns/KV token"),
)


ACRONYMS = frozenset({"SLO", "GPU", "TTFT", "TPOT", "CPU"})


def report_page(report: Report) -> str:
    """Return the page."""
    style = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    title = f"Simulation of {report.service}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style></head>",
            f"<body><main><h1>{escape(title)}</h1>",
            *_body(report),
            "</main></body></html>",
            "",
        ]
    )


def _body(report: Report) -> Iterator[str]:
    yield f"<p>{escape(report.headline)}</p><p>{escape(report.target_text)}</p>"
    if report.notes:
        yield "<ul class='notes'>"
        yield from (f"<li>{escape(note)}</li>" for note in report.notes)
        yield "</ul>"
    yield _section("Result")
    yield _table("Service level", SERVICE, report.results)
    yield _table("Cost and stability", COST, report.results)
    yield _scatter(report)
    yield _table("Latency", LATENCY, report.results)
    yield from _batches(report.results)
    yield from _tiers(report.results)
    yield _section("Load and replicas")
    yield from _replicas(report)
    yield _section("Limits of the batch")
    yield _legend(report.results)
    yield _lines(report, "f-seq", "Limit of sequences", lambda m: m.limit_sequences, _whole)
    yield _lines(report, "f-tok", "Limit of tokens per step", lambda m: m.limit_tokens, _whole)
    yield _section("Queue wait and batch time")
    yield _legend(report.results)
    wait_s, step_s = report.objectives_s
    yield _lines(
        report,
        "f-wait",
        "Mean queue wait",
        lambda m: m.queue_wait_s,
        seconds_text,
        objective_s=wait_s,
    )
    yield _lines(
        report,
        "f-step",
        "Mean batch time",
        lambda m: m.batch_time_s,
        seconds_text,
        objective_s=step_s,
    )
    yield _section("This simulation")
    yield _table("CPU time per run", CPU, report.results)
    yield f"<p>{escape(_hardware(report))}</p>"


def _section(title: str) -> str:
    return f"<h2>{escape(title)}</h2>"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


# -- tables -------------------------------------------------------------------------------------------


def heading(title: str) -> str:
    """Return a column's title for the page: only acronyms stay in capitals."""
    words = [word if word in ACRONYMS else word.lower() for word in title.split(" ")]
    return " ".join([words[0][0].upper() + words[0][1:], *words[1:]]).replace(" /s", "/s")


def _table(caption: str, columns: Sequence[Column], results: Sequence[Result]) -> str:
    heads = [
        f'<th scope="col" title="{escape(column.help)}">{escape(heading(column.title))}</th>'
        for column in columns
    ]
    rows = []
    for number, result in enumerate(results):
        cells = []
        for column in columns:
            spread = result.figures[column.figure]
            more = spread_text(spread, column.form)
            small = f"<small>{escape(more)}</small>" if more else ""
            cells.append(f"<td>{escape(value_text(spread.median, column.form))}{small}</td>")
        rows.append(_row(number, result.name, cells))
    return _whole_table(caption, heads, rows)


def _row(number: int, name: str, cells: Sequence[str]) -> str:
    return f'<tr><th scope="row">{_swatch(number)}{escape(name)}</th>{"".join(cells)}</tr>'


def _whole_table(caption: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>'
        f'<thead><tr><th scope="col">Alternative</th>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _batches(results: Sequence[Result]) -> Iterator[str]:
    rows = [
        _row(number, name, [f"<td>{escape(cell)}</td>" for cell in cells])
        for number, name, cells in batch_rows(results)
    ]
    if rows:
        heads = [
            f'<th scope="col" title="{escape(what)}">{escape(heading(title))}</th>'
            for title, what in TITLES.items()
        ]
        yield _whole_table("Batches", heads, rows)


def _tiers(results: Sequence[Result]) -> Iterator[str]:
    used = [tier for tier, row in results[0].tiers.items() if row["requests"].most > 0]
    if len(used) < 2:
        return
    heads = [
        f'<th scope="col">{escape(tier.capitalize())} {what}</th>'
        for tier in used
        for what in ("attainment", "refused")
    ]
    rows = []
    for number, result in enumerate(results):
        cells = [
            f"<td>{escape(value_text(result.tiers[tier][figure].median, form))}</td>"
            for tier in used
            for figure, form in (("slo_attainment", "percent"), ("refused", "whole"))
        ]
        rows.append(_row(number, result.name, cells))
    yield _whole_table("Tiers", heads, rows)


# -- figures ------------------------------------------------------------------------------------------


def _swatch(number: int) -> str:
    return f'<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true"><path class="line {style_name(number)}" d="M0,4H22"/></svg>'


def _legend(results: Sequence[Result]) -> str:
    entries = [
        f"<span>{_swatch(number)}{escape(result.name)}</span>"
        for number, result in enumerate(results)
    ]
    return f'<p class="legend">{"".join(entries)}</p>'


def _figure(title: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"


def _points(
    moments: Sequence[Moment], value: Callable[[Moment], float]
) -> list[tuple[float, float]]:
    return [(moment.time_s, value(moment)) for moment in moments]


def _replicas(report: Report) -> Iterator[str]:
    """Yield the load, and for each alternative its replicas: wanted as a line, ready as an area."""
    seconds = report.setting.seconds
    rows = report.results[0].moments
    load = _points(rows[1:], lambda moment: moment.requests_per_s)
    highest = max([value for _, value in load], default=1.0)
    title = "Requests per second (seed 1)"
    yield _figure(
        title,
        Panel(
            title,
            [Series("", LOAD, load, area=True), Series("requests/s", LOAD, load)],
            seconds,
            axis_to(highest, lambda value: f"{value:g}"),
            150,
        ).svg("f-load"),
    )
    most = max([m.replicas for result in report.results for m in result.moments], default=1)
    for number, result in enumerate(report.results):
        title = f"{result.name}: replicas (line) and ready replicas (area)"
        wanted = _points(result.moments, lambda moment: moment.replicas)
        ready = _points(result.moments, lambda moment: moment.ready)
        series = [
            Series("ready", number, _until(ready, seconds), steps=True, area=True),
            Series("replicas", number, _until(wanted, seconds), steps=True),
        ]
        axis = axis_to(most, lambda value: f"{value:g}", min(3, most))
        panel = Panel(title, series, seconds, axis, 100, ticks=min(3, most))
        yield _figure(title, panel.svg(f"f-replicas-{number}"))


def _until(points: list[tuple[float, float]], seconds: float) -> list[tuple[float, float]]:
    """Extend a stepped line to the end of the run."""
    return [*points, (seconds, points[-1][1])] if points else []


def _lines(
    report: Report,
    number: str,
    title: str,
    value: Callable[[Moment], float],
    text: Callable[[float], str],
    *,
    objective_s: float | None = None,
) -> str:
    """Return a figure with one line per alternative; with an objective, on a logarithmic axis."""
    series = [
        Series(result.name, style, _points(result.moments, value), steps=objective_s is None)
        for style, result in reversed(list(enumerate(report.results)))
    ]
    known = [y for one in series for _, y in one.points if not math.isnan(y)]
    objective = None
    if objective_s is None:
        axis: Axis = axis_to(max(known, default=1.0), text)
    else:
        axis = log_axis([*known, objective_s], text)
        objective = (objective_s, f"objective {text(objective_s)}")
    panel = Panel(title, series, report.setting.seconds, axis, objective=objective)
    return _figure(f"{title} (seed 1)", panel.svg(number))


def _scatter(report: Report) -> str:
    dots = [
        Dot(
            result.name,
            number,
            result.figures["gpu_hours"],
            result.figures["slo_attainment"],
        )
        for number, result in enumerate(report.results)
    ]
    across = axis_to(max([dot.across[2] for dot in dots]), lambda value: f"{value:g}")
    lowest = min([dot.up[1] for dot in dots])
    step = 0.005 if lowest > 0.98 else 0.02 if lowest > 0.9 else 0.1
    up = Axis(
        max(0.0, step * math.floor(lowest / step - 1e-9)),
        1.0,
        lambda value: f"{100 * value:.3g}%",
    )
    title = "SLO attainment (up) against GPU-hours (right): the upper left is best"
    return _figure(title, scatter_svg("f-scatter", title, dots, across=across, up=up))


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
