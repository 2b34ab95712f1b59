"""`fleetkeeper simulate`: show what Fleetkeeper would do with a load, and what it would cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fleetkeeper.commands.service.inputs import plan_inputs, read_inputs
from fleetkeeper.commands.service.render import FILES, NAMESPACE, SETTINGS
from fleetkeeper.commands.simulate.inputs import (
    LoadOptions,
    cases_of,
    check_start,
    load_of_service,
    read_batches,
    read_load,
    refuse,
    understood,
)
from fleetkeeper.commands.simulate.services import (
    check_budget,
    check_floor,
    chosen_services,
    machine_of,
    service_key,
    share_of,
)
from fleetkeeper.common.budget import Budget
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.simulate.arguments import (
    MAX_RATE,
    Kind,
    by_service,
    parse_alternatives,
    parse_faults,
    parse_what_ifs,
)
from fleetkeeper.simulate.comparison import (
    MAX_SEEDS,
    Case,
    Progress,
    Setting,
    compare_together,
    fixed_fleet_of,
    scenario_of,
)
from fleetkeeper.simulate.loads.patterns import Pattern
from fleetkeeper.simulate.outcome import Targets
from fleetkeeper.simulate.report.report import FleetReport, Report
from fleetkeeper.simulate.report.terminal import fleet_tables, report_tables
from fleetkeeper_steps.hardware import known_hardware

LOAD, MACHINE, COMPARE, OUTPUT = "Load", "Hardware", "Comparison", "Output"
NARROW = 120
"""Columns of output that is no terminal."""


def simulate(
    file: Annotated[list[str], FILES],
    *,
    service: Annotated[
        str,
        typer.Option(
            help="NAMESPACE/NAME of the service to play. Default: all in the files, which then share a GPU budget."
        ),
    ] = "",
    namespace: Annotated[str, NAMESPACE] = "default",
    settings: Annotated[Path | None, SETTINGS] = None,
    max_accelerators: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPU budget of all services together. Default: that of the settings file.",
        ),
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(
            help="Load instead of --trace or --pattern: a file with a trace, or PATTERN[:RATE[,PROMPT,OUTPUT]]. NAME=... is for one of several services, and may be repeated.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace: CSV (or .csv.gz) with the columns t_s, input_tokens, output_tokens, and optionally tier (realtime, standard, batch).",
            rich_help_panel=LOAD,
        ),
    ] = None,
    scale: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=1000,
            help="Factor on the requests of the trace: whole factors superpose shifted copies, a rest is thinned.",
            rich_help_panel=LOAD,
        ),
    ] = 1.0,
    pattern: Annotated[
        Pattern | None,
        typer.Option(
            help="Load without a trace, with Poisson arrivals: "
            + "; ".join(f"{pattern}: {pattern.text}" for pattern in Pattern)
            + ".",
            rich_help_panel=LOAD,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=MAX_RATE,
            help="Highest requests per second of the pattern. Default: 10.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=20_160,
            help="Length of the run. Default: the trace's; 60 for a pattern, a day for the pattern day.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(min=0.02, max=336, help="Length of the run in hours.", rich_help_panel=LOAD),
    ] = None,
    prompt_tokens: Annotated[
        float | None,
        typer.Option(
            min=1, help="Mean prompt of the pattern. Default: 1000.", rich_help_panel=LOAD
        ),
    ] = None,
    output_tokens: Annotated[
        float | None,
        typer.Option(min=1, help="Mean output of the pattern. Default: 200.", rich_help_panel=LOAD),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(
            help="Shares of realtime, standard and batch requests, for example 0.2,0.6,0.2. Default: all standard.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(
            help="TOKENS@WINDOW[,START]: a backlog for tier batch with a deadline. 5M@6h,2h: five million tokens that arrive after 2 hours, to be done within 6. Its lines have the mean tokens of the load. May be repeated.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Model and accelerators of a replica: a file with coefficients, or one of {', '.join(known_hardware())}. NAME=... is for one of several services, and may be repeated. Default: that of a simulated engine profile.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    fit_from_prometheus: Annotated[
        str | None,
        typer.Option(
            help="URL of the Prometheus that scrapes the service: coefficients, mean tokens, requests per second and cold start are measured values.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    fit_hours: Annotated[
        float,
        typer.Option(
            min=0.1, max=168, help="Hours of measurements to fit.", rich_help_panel=MACHINE
        ),
    ] = 1.0,
    against: Annotated[
        str,
        typer.Option(
            help="Alternatives with stock engines: hpa-concurrency:N, hpa-waiting:N, static:N; or advisory: Fleetkeeper only computes. Each with @TOKENS for another --max-num-batched-tokens. Separated by commas.",
            rich_help_panel=COMPARE,
        ),
    ] = "",
    fixed_fleet: Annotated[
        bool | None,
        typer.Option(
            "--fixed-fleet/--no-fixed-fleet",
            help="Also find the smallest static:N that reaches objectives.attainmentPercent, up to scaling.maxReplicas, by more runs of seed 1. Default: unless --against has a static:N.",
            show_default=False,
            rich_help_panel=COMPARE,
        ),
    ] = None,
    start: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Replicas that are ready at the start of each run, except of static:N. Default: scaling.minReplicas.",
            rich_help_panel=COMPARE,
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Another value of a field of the spec: scaling.maxReplicas=8,16. One run of Fleetkeeper per value. May be repeated.",
            rich_help_panel=COMPARE,
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="crash:600 ends an engine after 600 s; metrics:900-1200: no Prometheus; gpus:1800-2400: no accelerators for new pods. May be repeated.",
            rich_help_panel=COMPARE,
        ),
    ] = None,
    ttft: Annotated[
        float,
        typer.Option(
            min=0.001, help="Target of the time to the first token, s.", rich_help_panel=COMPARE
        ),
    ] = 2.0,
    tpot: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Target of the mean time per output token of a request, s.",
            rich_help_panel=COMPARE,
        ),
    ] = 0.05,
    seeds: Annotated[
        int, typer.Option(min=1, max=MAX_SEEDS, help="Runs of each case.", rich_help_panel=COMPARE)
    ] = 5,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON with the time line.", rich_help_panel=OUTPUT),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with figures to this file.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Show what Fleetkeeper would do with a load, and what it would cost. Requires no cluster.

    The operator's control code runs against simulated engines, in virtual time. The same options give
    the same report. Exit codes: 0 success; 1 Prometheus has no usable measurements; 2 an option is not
    understood; 64 a file has invalid content, or the service does not fit the hardware; 66 a file
    cannot be read.

    \b
    Examples:
      fleetkeeper simulate -f chat.yaml --hardware h100-8b --pattern ramp --rate 60
      fleetkeeper simulate -f chat.yaml --hardware h100-8b --trace monday.csv.gz --scale 4 --against hpa-concurrency:40,static:6
      fleetkeeper simulate -f chat.yaml --hardware h100-8b --pattern day --rate 40 --what-if scaling.maxReplicas=8,16 --html report.html
      fleetkeeper simulate -f chat.yaml --hardware h100-8b --pattern day --rate 40 --batch 50M@8h,12h
      fleetkeeper simulate -f chat.yaml -f code.yaml --hardware h100-8b --max-accelerators 8 --load chat=day:40 --load code=burst:20,2050,30
    """  # noqa: D301 - \b keeps the lines of the examples apart
    context = plan_inputs(settings)
    if max_accelerators is not None:
        context = replace(context, max_accelerators=max_accelerators)
    budget = context.gpu_budget
    alternatives = understood("--against", lambda: parse_alternatives(against))
    what_ifs = understood("--what-if", lambda: parse_what_ifs(what_if or ()))
    faults = understood("--fault", lambda: parse_faults(fault or ()))
    chosen = chosen_services(read_inputs(file, context, namespace).checked, service, budget)
    if len(chosen) > 1:
        refuse(("--batch", batch), ("--html", html), why="needs one service: add --service")
    if load:
        given = (("--trace", trace), ("--pattern", pattern), ("--rate", rate))
        means = (("--prompt-tokens", prompt_tokens), ("--output-tokens", output_tokens))
        refuse(*given, *means, why="cannot be used with --load, which has its own")
    if fit_from_prometheus is not None:
        refuse(("--hardware", hardware), why="is measured with --fit-from-prometheus")
    loads = understood("--load", lambda: by_service(load or (), list(chosen)))
    machines = understood("--hardware", lambda: by_service(hardware or (), list(chosen)))
    options = LoadOptions(
        trace, scale, pattern, rate, _seconds(minutes, hours), prompt_tokens, output_tokens, tiers
    )
    services: list[tuple[Sequence[Case], Report]] = []
    for number, (name, checked) in enumerate(chosen.items()):
        own = load_of_service(loads.get(name), options)
        machine, own = machine_of(checked, machines.get(name), fit_from_prometheus, fit_hours, own)
        cases, notes = cases_of(checked, machine, context, alternatives, what_ifs)
        check_floor(machine, tpot)
        check_start(cases, start)
        if checked.service is None:
            raise AssertionError("cases_of ends the command for an invalid service")
        played = read_load(own, cases[0].model, checked.service.spec.engine.max_model_length)
        batches, batch_notes = read_batches(batch or (), played.seconds)
        setting = Setting(
            played.load,
            played.seconds,
            Targets(ttft, tpot),
            seeds,
            faults,
            batches,
            played.line,
            start,
            service_key(name),
            number,
            share_of(budget, name, chosen),
        )
        all_notes = (*notes, *played.notes, *batch_notes)
        services.append((cases, Report(name, machine, played.text, setting, (), all_notes)))
    begun = [scenario_of(cases[0], report.setting, 1) for cases, report in services]
    check_budget(budget, {n: s.replicas * s.gpus for n, s in zip(chosen, begun, strict=True)})
    if fixed_fleet is None:
        fixed_fleet = all(each.kind is not Kind.STATIC for each in alternatives)
    with _progress(services, searches=fixed_fleet) as progress:
        reports = _compared(services, budget, progress, searches=fixed_fleet)
    _write(reports, budget, html, as_json=as_json)


def _compared(
    services: Sequence[tuple[Sequence[Case], Report]],
    budget: Budget,
    progress: Progress,
    *,
    searches: bool,
) -> list[Report]:
    """Play all services until the shortest load ends, and return their reports with the results."""
    seconds = min(report.setting.seconds for _, report in services)
    settings = [replace(report.setting, seconds=seconds) for _, report in services]
    cases = [cases for cases, _ in services]
    found = compare_together(list(zip(cases, settings, strict=True)), budget, progress)
    reports = []
    for (_, report), setting, results in zip(services, settings, found, strict=True):
        fixed, notes = fixed_fleet_of(results, setting, progress) if searches else ((), ())
        notes = report.notes + notes
        if seconds < report.setting.seconds:
            notes += (f"the run ends after {seconds:.0f} s, with the shortest load",)
        reports.append(replace(report, setting=setting, results=results + fixed, notes=notes))
    return reports


def _seconds(minutes: float | None, hours: float | None) -> float | None:
    if minutes is not None and hours is not None:
        raise typer.BadParameter("give --minutes or --hours, not both", param_hint="--hours")
    if hours is not None:
        return 3600 * hours
    return None if minutes is None else 60 * minutes


@contextmanager
def _progress(
    services: Sequence[tuple[Sequence[Case], Report]], *, searches: bool
) -> Iterator[Progress]:
    """Show a bar on standard error if it is a terminal. `searches`: more runs follow for a fixed fleet."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    cases, setting = services[0][0], services[0][1].setting
    runs = len(cases) * setting.seeds
    if searches:
        # A bisection takes about so many runs; then comes the row of the fixed fleet.
        runs += sum(
            cases[0].model.settings.max_replicas.bit_length() + setting.seeds
            for cases, _ in services
        )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulate", total=runs * setting.seconds)
        begun = 0

        def show(case: Case, seed: int, seconds: float) -> None:
            nonlocal begun
            begun += seconds == 0
            done = (begun - 1) * setting.seconds + seconds
            bar.update(task, completed=done, description=f"{case.name}, seed {seed}")

        yield show


def _write(reports: Sequence[Report], budget: Budget, html: Path | None, *, as_json: bool) -> None:
    report, *others = reports
    fleet = FleetReport(tuple(reports), budget) if others else None
    if html is not None:
        # Only this option needs its template engine.
        from fleetkeeper.simulate.report.page import report_page  # noqa: PLC0415

        try:
            html.write_text(report_page(report), "utf-8")
        except OSError as problem:
            stop(ExitCode.FAILED, f"{html}: cannot write the file: {problem.strerror}")
    if as_json:
        typer.echo(json.dumps((fleet or report).as_json(), indent=1))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, NARROW))
    console.print(fleet_tables(fleet) if fleet else report_tables(report))
