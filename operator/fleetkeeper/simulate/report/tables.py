"""The tables of the report as texts, for the terminal and the page: one row per alternative."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import Final, NamedTuple, Protocol

from fleetkeeper.api.status_enums import Subject
from fleetkeeper.simulate.autoscalers import BUDGET
from fleetkeeper.simulate.batch_figures import BatchEnd, BatchFigures
from fleetkeeper.simulate.comparison import Result, Spread
from fleetkeeper.simulate.recorder import DecisionMade
from fleetkeeper.simulate.report.report import Total, duration_text, spread_text, value_text


class Column(NamedTuple):
    """A column that shows a figure."""

    title: str
    figure: str
    form: str
    """percent, seconds, whole or number."""
    help: str
    """The meaning in one sentence."""


class Head(NamedTuple):
    """The title of a column, and what it means."""

    title: str
    help: str = ""
    is_text: bool = False
    """Whether the column has words instead of figures."""


class Cell(NamedTuple):
    """A figure, and its range over the seeds; an empty string if all have the same."""

    text: str
    spread: str = ""


class Row(NamedTuple):
    """The figures of an alternative. `number`: its place among the alternatives, None for other rows."""

    number: int | None
    name: str
    cells: tuple[Cell, ...]


class Table(NamedTuple):
    """A table whose first column has the names of the rows."""

    caption: str
    heads: tuple[Head, ...]
    rows: tuple[Row, ...]
    first: str = "ALTERNATIVE"
    """The title of the first column."""
    max_rows: int | None = None
    """The most rows in a terminal."""


SERVICE: Final[Sequence[Column]] = (
    Column("SLO ATTAINMENT", "slo_attainment", "percent", "requests within both targets, of all"),
    Column("GOODPUT /S", "goodput_per_s", "number", "requests per second within both targets"),
    Column("WAIT ATTAINED", "queue_wait_attainment", "percent", "queue waits within the objective"),
    Column("BATCH ATTAINED", "batch_time_attainment", "percent", "steps within the objective"),
    Column("REFUSED", "refused", "whole", "requests that got status 429, or found no replica"),
    Column("LOST", "lost", "whole", "requests in an engine that ended"),
)
LATENCY: Final[Sequence[Column]] = (
    Column("TTFT P50", "ttft_p50_s", "seconds", "time to the first token, median"),
    Column("TTFT P95", "ttft_p95_s", "seconds", "time to the first token, 95th percentile"),
    Column("TPOT P50", "tpot_p50_s", "seconds", "mean ITL of a request, median"),
    Column("TPOT P95", "tpot_p95_s", "seconds", "mean ITL of a request, 95th percentile"),
    Column("PREEMPTIONS", "preemptions", "whole", "sequences computed again for lack of KV cache"),
)
COST: Final[Sequence[Column]] = (
    Column("GPU HOURS", "gpu_hours", "number", "replica-hours times the GPUs of a replica"),
    Column(
        "REPLICA HOURS", "replica_hours", "number", "from the creation of replicas to their end"
    ),
    Column("MOST REPLICAS", "most_replicas", "whole", "the most replicas at any time"),
    Column("CHANGES", "replica_changes", "whole", "changes of the number of replicas"),
    Column("REVERSALS", "replica_reversals", "whole", "changes in the other direction"),
)
CPU: Final[Sequence[Column]] = (
    Column("ENGINE MODEL CPU", "engine_cpu_s", "seconds", "of this simulation, per run"),
    Column("CONTROL CPU", "control_cpu_s", "seconds", "of the operator's code, per run"),
)
BATCH: Final = (
    Head("BATCH", "tokens, window and start"),
    Head("FINISHED AT", "time since the start of the run, median"),
    Head("DEADLINE", "met by every seed, or missed by so much in the worst one"),
    Head(
        "REPLICAS ADDED",
        "replicas that were added for the deadlines of all batches, median",
    ),
    Head("GPU HOURS", "with the batches, median"),
    Head("GPU HOURS WITHOUT", "of the same run without batches, median"),
)
TOTAL: Final = tuple(map(Head, ("MISSED", "REFUSED", "GPU HOURS", "MOST GPUS")))


DECISIONS: Final = (
    Head("CHANGE", is_text=True),
    Head("RULE", "the reason, as in status.scaling", is_text=True),
    Head("MESSAGE", "the figures that the rule was decided by", is_text=True),
)
MAX_DECISIONS: Final = 20


def tables_of(results: Sequence[Result]) -> list[Table]:
    """Return the tables: first service level and cost, last the CPU time of the simulation."""
    found = [
        figures_table("Service level", SERVICE, results),
        figures_table("Cost and stability", COST, results),
        figures_table("Latency", LATENCY, results),
    ]
    if any(result.batch is not None for result in results):
        found.append(Table("Batches", BATCH, tuple(_batches(results))))
    tiers = [tier for tier, figures in results[0].tiers.items() if figures["requests"].most > 0]
    if len(tiers) > 1:
        found.append(_tiers(tiers, results))
    if results[0].decided:
        rows = tuple(_decisions(results[0].decided))
        caption = "Decisions of Fleetkeeper (seed 1)"
        found.append(Table(caption, DECISIONS, rows, "TIME (SEED 1)", MAX_DECISIONS))
    return [*found, figures_table("CPU time per run", CPU, results)]


def total_table(totals: Sequence[Total]) -> Table:
    """Return the table of several services: what all their clients missed, and what all of them cost."""
    rows = []
    for number, total in enumerate(totals):
        missed = total.missed / total.requests if total.requests else math.nan
        figures = (
            (missed, "percent"),
            (total.refused, "whole"),
            (total.gpu_hours, "number"),
            (total.peak_gpus, "whole"),
        )
        cells = tuple(Cell(value_text(value, form)) for value, form in figures)
        rows.append(Row(number, total.name, cells))
    return Table("All services", TOTAL, tuple(rows), "ALL SERVICES")


class Figured(Protocol):
    """An alternative with figures."""

    @property
    def name(self) -> str:
        """The name in reports."""

    @property
    def figures(self) -> Mapping[str, Spread]:
        """The figures by name."""


def figures_table(caption: str, columns: Sequence[Column], results: Sequence[Figured]) -> Table:
    """Return a table with a row for each alternative: the medians, and their spread."""
    heads = tuple(Head(column.title, column.help) for column in columns)
    rows = []
    for number, result in enumerate(results):
        found = [(result.figures[column.figure], column.form) for column in columns]
        cells = [
            Cell(value_text(spread.median, form), spread_text(spread, form))
            for spread, form in found
        ]
        rows.append(Row(number, result.name, tuple(cells)))
    return Table(caption, heads, tuple(rows))


def _tiers(tiers: Sequence[str], results: Sequence[Result]) -> Table:
    """Return the SLO attainment and the refusals of each tier."""
    heads = [Head(f"{tier.upper()} {what}") for tier in tiers for what in ("ATTAINMENT", "REFUSED")]
    figures = (("slo_attainment", "percent"), ("refused", "whole"))
    rows = [
        Row(
            number,
            result.name,
            tuple(
                Cell(value_text(result.tiers[tier][figure].median, form))
                for tier in tiers
                for figure, form in figures
            ),
        )
        for number, result in enumerate(results)
    ]
    return Table("Tiers", tuple(heads), tuple(rows))


def _batches(results: Sequence[Result]) -> Iterator[Row]:
    """Yield a row for each alternative and batch: the end of the batch, and the cost of all."""
    for number, result in enumerate(results):
        if result.batch is not None:
            for texts in _ends(result.batch):
                yield Row(number, result.name, tuple(map(Cell, texts)))


def _ends(figures: BatchFigures) -> Iterator[tuple[str, ...]]:
    runs = figures.runs
    cost = (
        _median([run.added for run in runs], "whole"),
        _median([run.gpu_hours for run in runs], "number"),
        _median([run.gpu_hours_without for run in runs], "number"),
    )
    for batch, ends in figures.ends():
        finished = [end.finished_s for end in ends if not math.isnan(end.finished_s)]
        at = duration_text(median(finished)) if len(finished) == len(ends) else "not finished"
        yield batch.text, at, deadline_text(ends), *cost


def _decisions(decided: Sequence[DecisionMade]) -> Iterator[Row]:
    """Yield each breaker and the limit of the budget, the first time, and then each change of the replicas."""
    once = [(_once(each), each) for each in decided if each.subject != Subject.REPLICAS]
    for what, count in Counter(what for what, _ in once).items():
        first = next(each for of, each in once if of == what)
        yield _decision(f"{what}{f' {count} times' * (count > 1)}", first)
    for each in decided:
        if each.subject == Subject.REPLICAS:
            yield _decision(f"replicas {each.before} -> {each.after}", each)


def _once(made: DecisionMade) -> str:
    if made.subject == BUDGET:
        return "limited by the budget"
    return f"{made.after.partition(' ')[0]} breaker opened"


def _decision(change: str, made: DecisionMade) -> Row:
    cells = (Cell(change), Cell(made.reason), Cell(made.message))
    return Row(None, str(timedelta(seconds=round(made.time_s))), cells)


def _median(values: Sequence[float], form: str) -> str:
    return value_text(median(values), form)


def deadline_text(ends: Sequence[BatchEnd]) -> str:
    """Return `met`, or by how much the worst seed missed the deadline; `-` if that is unknown."""
    late = [end for end in ends if end.late_s > 0]
    if late:
        worst = max(late, key=lambda end: end.late_s)
        more = "more than " if worst.left else ""
        return f"missed by {more}{duration_text(worst.late_s)}"
    return "met" if all(end.late_s <= 0 and not end.left for end in ends) else "-"
