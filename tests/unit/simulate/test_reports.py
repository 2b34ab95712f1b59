"""Reports: golden texts of a made-up comparison, the schema of the JSON, and a page that stands alone.

`python -m tests.unit.simulate.test_reports` writes the golden files again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.common.budget import Budget
from fleetkeeper.simulate.arguments import FLEETKEEPER, parse_alternatives, parse_batches
from fleetkeeper.simulate.batch_figures import BatchEnd, BatchFigures, BatchRun
from fleetkeeper.simulate.comparison import FIGURES, TIER_FIGURES, Case, Result, Setting, Spread
from fleetkeeper.simulate.loads.arrivals import trace
from fleetkeeper.simulate.recorder import DecisionMade, Moment
from fleetkeeper.simulate.report.figures import Axis, axis_to, known_runs, log_axis
from fleetkeeper.simulate.report.page import heading, report_page
from fleetkeeper.simulate.report.report import (
    FleetReport,
    Report,
    duration_text,
    seconds_text,
    value_text,
)
from fleetkeeper.simulate.report.tables import deadline_text, tables_of
from fleetkeeper.simulate.report.terminal import fleet_tables, report_tables
from fleetkeeper.simulate.service_model import model_of
from fleetkeeper_steps.hardware import known_hardware

GOLDEN = Path(__file__).parents[2] / "golden" / "simulate"
HARDWARE = known_hardware()["h100-8b"]
UNKNOWN = Spread(math.nan, math.nan, math.nan)


def made_up(case: Case, level: float, replicas: int) -> Result:
    """Return a result with simple figures: a half less and more than the median."""
    figures = {name: Spread(level, level / 2, level * 1.5) for name in FIGURES}
    figures |= {
        "slo_attainment": Spread(0.95 + level / 100, 0.95, 0.999),
        "queue_wait_attainment": Spread(1.0, 1.0, 1.0),
        "batch_time_attainment": Spread(0.97, 0.9699, 0.97),
        "requests": Spread(1000.0, 1000.0, 1000.0),
        "refused": Spread(1234.0, 1200.0, 1300.0),
        "lost": Spread(0.0, 0.0, 0.0),
        "tpot_p95_s": UNKNOWN,
        "gpu_hours": Spread(10.0 * level, 9.0 * level, 12.0 * level),
    }
    tier = {name: Spread(level / 10, 0.0, 1.0) for name in TIER_FIGURES}
    unused = dict.fromkeys(TIER_FIGURES, Spread(0.0, 0.0, 0.0))
    moments = tuple(
        Moment(at, 5.0 * bool(at), replicas, replicas - (at == 15), 3, 0,
               math.nan if at == 0 else 0.01 * level, 0.02, 256.0 / level, 8192.0)
        for at in (0.0, 15.0, 30.0)
    )  # fmt: skip
    tiers = {"realtime": tier, "standard": tier, "batch": unused}
    return Result(case, figures, tiers, moments)


def opened(breaker: str, time_s: float) -> DecisionMade:
    """Return the opening of a breaker."""
    message = f"Breaker {breaker} of <chat> opens: a reason that a terminal cuts at its edge, with figures"
    return DecisionMade(
        time_s, "breaker", f"{breaker} HalfOpen", f"{breaker} Open", "Opens", message
    )


def moved(time_s: float, before: int, after: int) -> DecisionMade:
    """Return a change of the replicas."""
    return DecisionMade(
        time_s, "replicas", str(before), str(after), "LoadForecast", "20 requests/s need 3 replicas"
    )


DECIDED = (opened("batch", 5.0), moved(15.0, 2, 3), opened("control", 20.0), opened("batch", 25.0))


def example() -> Report:
    """Return the comparison of the golden files."""
    spec = InferenceServiceSpec.model_validate({"model": {"source": "pvc://m/x"}})
    model = model_of(spec, 1, HARDWARE, 1)
    (static,) = parse_alternatives("static:4@512")
    return Report(
        "team-a/chat",
        HARDWARE,
        "trace <monday>.csv.gz (1,000 requests)",
        Setting(trace(()), 45.0, seeds=3),
        (
            replace(made_up(Case(model, FLEETKEEPER), 1.0, 2), decided=DECIDED),
            made_up(Case(model, FLEETKEEPER, "scaling.maxReplicas=3"), 2.0, 3),
            made_up(Case(model, static), 4.0, 4),
        ),
        ("a & b",),
    )


def texts() -> dict[str, str]:
    """Return the golden texts by file name."""
    out = StringIO()
    Console(file=out, width=120, no_color=True).print(report_tables(example()))
    table = "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
    content = example().as_json()
    content["alternatives"] = content["alternatives"][:1]
    return {"table.txt": table, "report.json": json.dumps(content, indent=1) + "\n"}


@pytest.mark.parametrize("name", ["table.txt", "report.json"])
def test_a_report_looks_as_before(name: str) -> None:
    assert texts()[name] == (GOLDEN / name).read_text("utf-8")


def with_batches() -> Report:
    """Return the comparison with two batches: Fleetkeeper meets both deadlines, the static one does not."""
    report = example()
    batches = parse_batches(["5M@6h,2h", "1M@3h"])
    ours, _, static = report.results
    met = BatchRun((BatchEnd(18_000.0, -10_800.0, 0.0), BatchEnd(9000.0, -1800.0, 0.0)), 2, 12, 10)
    late = BatchRun(
        (BatchEnd(math.nan, 900.0, 4e5), BatchEnd(12_600.0, 1800.0, 0.0)), math.nan, 8, 8
    )
    unknown = BatchRun((BatchEnd(math.nan, math.nan, 9.0), met.ends[1]), math.nan, 8, 8)
    return replace(
        report,
        results=(
            replace(ours, batch=BatchFigures(batches, (met, met))),
            replace(static, batch=BatchFigures(batches, (late, unknown))),
        ),
    )


def test_batches_have_a_row_each_and_the_cost_of_all() -> None:
    (table,) = [each for each in tables_of(with_batches().results) if each.caption == "Batches"]
    assert [(row.name, *(cell.text for cell in row.cells)) for row in table.rows] == [
        ("fleetkeeper", "5M@6h,2h", "5 h", "met", "2", "12.00", "10.00"),
        ("fleetkeeper", "1M@3h", "2.5 h", "met", "2", "12.00", "10.00"),
        ("static:4@512", "5M@6h,2h", "not finished", "missed by more than 15 min", "-", "8.00", "8.00"),
        ("static:4@512", "1M@3h", "3 h", "missed by 30 min", "-", "8.00", "8.00"),
    ]  # fmt: skip


def test_a_batch_that_may_still_be_in_time_is_unknown() -> None:
    assert deadline_text([BatchEnd(math.nan, math.nan, 9.0), BatchEnd(9.0, -1.0, 0.0)]) == "-"


def test_table_page_and_json_show_batches() -> None:
    report = with_batches()
    out = StringIO()
    Console(file=out, width=120, no_color=True).print(report_tables(report))
    page = report_page(report)
    for text in (out.getvalue(), page):
        assert "missed by more than 15 min" in text
        assert "not finished" in text
    assert "<caption>Batches</caption>" in page
    assert Page(page).open == []
    content = json.loads(json.dumps(report.as_json(), allow_nan=False))
    ours, static = (row["batch"] for row in content["alternatives"])
    assert ours["batches"][0]["met"] == [True, True]
    assert static["batches"][0]["finished_s"] == [None, None]
    assert (static["added_replicas"], static["gpu_hours_without"]) == ([None, None], [8, 8])
    assert "batch" not in example().as_json()["alternatives"][0]


def test_breakers_come_first_with_their_count_and_every_change_has_its_rule() -> None:
    table = tables_of(example().results)[-2]
    assert (table.first, table.caption) == ("TIME (SEED 1)", "Decisions of Fleetkeeper (seed 1)")
    assert [(row.number, row.name, *(cell.text for cell in row.cells[:2])) for row in table.rows] == [
        (None, "0:00:05", "batch breaker opened 2 times", "Opens"),
        (None, "0:00:20", "control breaker opened", "Opens"),
        (None, "0:00:15", "replicas 2 -> 3", "LoadForecast"),
    ]  # fmt: skip
    assert table.rows[2].cells[2].text == "20 requests/s need 3 replicas"


def test_a_terminal_shows_twenty_decisions_and_the_page_all() -> None:
    report = example()
    many = tuple(moved(3600.0 + number, number, number + 1) for number in range(1, 25))
    report = replace(report, results=(replace(report.results[0], decided=many),))
    out = StringIO()
    Console(file=out, width=70).print(report_tables(report))
    assert (out.getvalue().count("replicas "), "and 4 more" in out.getvalue()) == (20, True)
    assert "replicas 20 -> 21" in out.getvalue()
    page = report_page(report)
    assert page.count('<td class="text">replicas ') == 24
    assert "1:00:24" in page


def test_a_result_without_decisions_has_no_table_of_them() -> None:
    assert not [table for table in tables_of(example().results[1:]) if "Decisions" in table.caption]


def judged(attained: float, *others: tuple[str, float, float], **figures: float) -> str:
    """Return the verdict for an attainment at 10 GPU-hours; others have attainment and GPU-hours."""
    report = example()
    base = {
        "requests": 1000.0, "refused": 0.0, "gpu_hours": 10.0, "most_replicas": 3.0,
        "queue_wait_attainment": 0.99, "batch_time_attainment": 0.99, "slo_attainment": attained,
    }  # fmt: skip

    def of(result: Result, values: Mapping[str, float]) -> Result:
        new = {name: Spread(value, value, value) for name, value in values.items()}
        return replace(result, figures={**result.figures, **new})

    ours = of(report.results[0], base | figures)
    rows = [
        of(
            replace(ours, case=replace(ours.case, alternative=parse_alternatives(name)[0])),
            {"slo_attainment": share, "gpu_hours": hours},
        )
        for name, share, hours in others
    ]
    verdict = replace(report, results=(ours, *rows)).verdict
    assert "\n" not in verdict
    return verdict


def test_the_verdict_compares_with_the_cheapest_that_attains_what_is_asked() -> None:
    text = judged(
        0.973, ("static:3", 0.96, 12.5), ("static:2", 0.94, 8.0), ("hpa-waiting:1", 0.99, 20.0)
    )
    assert text == (
        "Fleetkeeper reaches the objective: 97.3% of requests within the targets, 95% asked. "
        "It takes 10.00 GPU-hours, 0.80 times the 12.50 of static:3, the cheapest alternative that reaches 95%."
    )
    # What the tables show as 95.0% has reached 95%.
    assert judged(0.9496, ("static:2", 0.949, 8.0)).endswith(
        "It takes 10.00 GPU-hours; no alternative reaches 95%."
    )
    assert judged(0.95).endswith("95% asked. It takes 10.00 GPU-hours.")


@pytest.mark.parametrize(
    ("others", "figures", "words"),
    [
        ((), {"most_replicas": 8.0, "refused": 1234.0}, (
            "1,234 requests were refused, and scaling.maxReplicas (8) was reached: raise it",
            "--what-if scaling.maxReplicas=16",
        )),
        ((), {"most_replicas": 8.0}, ("scaling.maxReplicas (8) was reached: raise it",)),
        # A fixed fleet within maxReplicas is enough, so the bound is not what is missing.
        ((("static:8", 0.96, 12.0),), {"most_replicas": 8.0, "refused": 7.0}, (
            "static:8 reaches 95% with 12.00", "7 requests were refused, although scaling.maxReplicas (8) is enough", "--what-if scaling.minReplicas=2",
        )),
        ((("static:9", 0.96, 12.0),), {"most_replicas": 8.0}, ("scaling.maxReplicas=16",)),
        ((), {"queue_wait_attainment": 0.9}, (
            "Only 90.0% of queue waits are within the objective", "although scaling.maxReplicas (8) was not reached", "scaling.minReplicas=2",
        )),
        ((), {}, ("objectives of the spec are attained", "--ttft 2 and --tpot 0.05", "tighten them")),
        ((), {"batch_time_attainment": 0.9}, ("Only 90.0% of the steps", "batchTimeMilliseconds")),
    ],
)  # fmt: skip
def test_a_missed_objective_has_advice_from_the_figures(
    others: tuple[tuple[str, float, float], ...], figures: dict[str, float], words: tuple[str, ...]
) -> None:
    text = judged(0.9, *others, **figures)
    assert text.startswith(
        "Fleetkeeper misses the objective: 90.0% of requests within the targets, 95% asked."
    )
    for word in words:
        assert word in text
    assert text.count("--what-if") <= 1


def limited(time_s: float, asked: int, allowed: int) -> DecisionMade:
    """Return what a budget did not allow."""
    message = f"The fleet's budget of 5 GPUs allows {allowed} of {asked} replicas"
    return DecisionMade(time_s, "budget", str(asked), str(allowed), "GPUBudget", message)


def test_a_budget_that_limits_has_one_row_and_the_advice() -> None:
    report = example()
    decided = (limited(90.0, 4, 3), moved(95.0, 2, 3), limited(900.0, 5, 3))
    first, *others = report.results
    missed = {"slo_attainment": Spread(0.9, 0.9, 0.9)}
    first = replace(first, decided=decided, figures={**first.figures, **missed})
    report = replace(report, results=(first, *others))
    table = tables_of(report.results)[-2]
    assert [(row.name, *(cell.text for cell in row.cells)) for row in table.rows] == [
        ("0:01:30", "limited by the budget 2 times", "GPUBudget", decided[0].message),
        ("0:01:35", "replicas 2 -> 3", "LoadForecast", decided[1].message),
    ]
    assert report.verdict.endswith(
        "The fleet's budget of 5 GPUs allows 3 of 4 replicas, first after 90 s (seed 1): raise --max-accelerators."
    )


def fleet() -> FleetReport:
    """Return two services. With the smallest fixed fleet, one has four replicas and the other two."""
    chat = example()
    *ours, fixed = chat.results
    (static,) = parse_alternatives("static:2")
    code = replace(made_up(Case(fixed.case.model, static), 2.0, 2))
    return FleetReport(
        (chat, replace(chat, service="team-a/code", results=(*ours, code))),
        Budget(6, {"team-a": 5}),
    )


def test_several_services_have_a_total_and_a_report_each() -> None:
    out = StringIO()
    Console(file=out, width=120, no_color=True).print(fleet_tables(fleet()))
    head, _, _, heads, ours, _, _, fixed, *_ = out.getvalue().splitlines()
    assert head.rstrip() == "2 services under a budget of 6 GPUs, 5 in namespace team-a"
    assert heads.split() == ["ALL", "SERVICES", "MISSED", "REFUSED", "HOURS", "GPUS"]
    # 1,000 requests each: 4% and 4% missed; of the fixed fleets 1% and 3%.
    assert ours.split() == ["fleetkeeper", "4.0%", "2,468", "20.00", "4"]
    assert fixed.split() == ["static:4+2", "2.0%", "2,468", "60.00", "6"]
    for name in ("team-a/chat", "team-a/code"):
        assert out.getvalue().count(f"{name}: ") == 1
    content = json.loads(json.dumps(fleet().as_json(), allow_nan=False))
    assert (content["schema"], content["max_accelerators"]) == (1, 6)
    assert content["max_accelerators_by_namespace"] == {"team-a": 5}
    assert content["totals"][0] == {
        "name": "fleetkeeper", "requests": 2000, "missed": pytest.approx(80), "refused": 2468,
        "gpu_hours": 20, "peak_gpus": 4,
    }  # fmt: skip
    assert [report["service"] for report in content["services"]] == ["team-a/chat", "team-a/code"]


def test_a_fixed_fleet_that_one_service_lacks_has_no_total() -> None:
    chat, code = fleet().reports
    short = replace(code, results=code.results[:-1])
    assert len(FleetReport((chat, short), Budget(6)).totals) == 2


def test_there_is_no_verdict_without_enough_requests() -> None:
    for requests in (499.0, math.nan):
        text = judged(0.5, requests=requests)
        assert text.startswith("No verdict: ")
        assert "500" in text
    assert not judged(0.5, requests=500.0).startswith("No verdict")


def test_every_form_of_the_report_has_the_verdict() -> None:
    report = example()
    out = StringIO()
    Console(file=out, width=500).print(report_tables(report))
    assert out.getvalue().splitlines()[1] == report.verdict
    assert f"<strong>{report.verdict}</strong>" in report_page(report)
    content = report.as_json()
    assert content["verdict"] == report.verdict
    ours, _, static = content["alternatives"]
    assert static["decisions"] == []
    assert ours["decisions"][1] == {
        "time_s": 15.0, "subject": "replicas", "from": "2", "to": "3", "reason": "LoadForecast",
        "message": "20 requests/s need 3 replicas",
    }  # fmt: skip


def test_the_json_has_no_nan_and_one_entry_per_alternative() -> None:
    content = json.loads(json.dumps(example().as_json(), allow_nan=False))
    assert [row["name"] for row in content["alternatives"]] == [
        "fleetkeeper", "fleetkeeper scaling.maxReplicas=3", "static:4@512",
    ]  # fmt: skip
    assert content["alternatives"][0]["figures"]["tpot_p95_s"]["median"] is None
    assert content["alternatives"][0]["time_line"][0]["queue_wait_s"] is None


def test_a_single_tier_has_no_table_of_tiers() -> None:
    report = example()
    for result in report.results:
        assert isinstance(result.tiers, dict)
        result.tiers["realtime"] = result.tiers["batch"]
    out = StringIO()
    Console(file=out, width=120).print(report_tables(report))
    assert "STANDARD" not in out.getvalue()
    assert "Standard attainment" not in report_page(report)


class Page(HTMLParser):
    """The elements of a page; open elements must be closed in order."""

    EMPTY = frozenset({"meta", "path", "circle"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_is_accessible() -> None:
    text = report_page(example())
    page = Page(text)
    assert page.open == []
    tags = [tag for tag, _ in page.found]
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert not re.search(r"https?:|url\(|@import|src=|href=", text)
    assert dict(page.found)["html"] == {"lang": "en"}
    assert "<title>Simulation of team-a/chat</title>" in text
    assert "prefers-color-scheme:dark" in text
    assert {attrs.get("scope") for tag, attrs in page.found if tag == "th"} == {"col", "row"}
    assert tags.count("caption") == tags.count("table") == 6
    figures = [attrs for tag, attrs in page.found if tag == "svg" and "role" in attrs]
    assert len(figures) == 1 + 1 + 3 + 2 + 2
    ids = {attrs["id"] for _, attrs in page.found if "id" in attrs}
    for attrs in figures:
        assert attrs["role"] == "img"
        assert set((attrs["aria-labelledby"] or "").split()) <= ids
    assert len(ids) == 2 * len(figures)


def test_the_page_escapes_names_and_draws_no_unknown_value() -> None:
    text = report_page(example())
    assert "&lt;monday&gt;" in text
    assert "a &amp; b" in text
    assert "nan" not in text.lower()


def test_a_page_of_a_run_without_requests_is_drawn() -> None:
    report = example()
    empty = tuple(
        Result(one.case, dict.fromkeys(FIGURES, UNKNOWN) | {
            "gpu_hours": Spread(0.0, 0.0, 0.0), "slo_attainment": Spread(1.0, 1.0, 1.0),
        }, one.tiers, one.moments[:1])
        for one in report.results
    )  # fmt: skip
    page = Page(report_page(Report("a/b", HARDWARE, "none", report.setting, empty)))
    assert page.open == []


def test_axes_have_round_ticks_and_hold_every_value() -> None:
    axis = axis_to(37.0, str)
    assert (axis.ticks(4), axis.high, axis.ratio(20.0)) == (
        [0.0, 10.0, 20.0, 30.0, 40.0],
        40.0,
        0.5,
    )
    wait = log_axis([0.0, 0.004, 2.0], str)
    assert wait.ticks(4) == pytest.approx([0.001, 0.01, 0.1, 1.0, 10.0])
    assert [wait.ratio(0.0), wait.ratio(0.1)] == pytest.approx([0.0, 0.5])
    assert Axis(0.9, 1.0, str).ticks(5) == pytest.approx([0.9, 0.92, 0.94, 0.96, 0.98, 1.0])
    runs = list(known_runs([(0, math.nan), (1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0)]))
    assert runs == [[(1, 1.0), (2, 2.0)], [(4, 1.0)]]


def test_figures_are_written_for_people() -> None:
    assert [value_text(value, form) for value, form in (
        (0.9987, "percent"), (1234.4, "whole"), (12.345, "number"), (1234.5, "number"), (math.nan, "percent"),
    )] == ["99.9%", "1,234", "12.35", "1,234", "-"]  # fmt: skip
    assert [seconds_text(value) for value in (0.0, 0.0123, 1.234, 125.0, 9000.0)] == [
        "0 s", "12.3 ms", "1.23 s", "125 s", "2.5 h",
    ]  # fmt: skip
    assert [heading(title) for title in ("SLO ATTAINMENT", "GOODPUT /S", "TTFT P50")] == [
        "SLO attainment", "Goodput/s", "TTFT p50",
    ]  # fmt: skip
    assert [duration_text(value) for value in (45.0, 3600.0, 86_400.0)] == [
        "45 s",
        "60 min",
        "24 h",
    ]


if __name__ == "__main__":
    for name, text in texts().items():
        (GOLDEN / name).write_text(text, "utf-8")
