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

from fleetkeeper.api.profiles.profile import effective_resources
from fleetkeeper.commands.service.inputs import Checked, plan_inputs, read_inputs
from fleetkeeper.commands.service.render import NAMESPACE, SETTINGS
from fleetkeeper.commands.simulate.inputs import (
    LoadOptions,
    cases_of,
    check_start,
    hardware_of_profile,
    read_batches,
    read_hardware,
    read_load,
    understood,
)
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.simulate.arguments import Kind, parse_alternatives, parse_faults, parse_what_ifs
from fleetkeeper.simulate.comparison import (
    Case,
    Progress,
    Setting,
    compare,
    fixed_fleet_of,
)
from fleetkeeper.simulate.loads.patterns import Pattern
from fleetkeeper.simulate.outcome import Targets
from fleetkeeper.simulate.report.report import Report, plural
from fleetkeeper.simulate.report.terminal import report_tables
from fleetkeeper_steps.hardware import Hardware, floor_s, known_hardware

LOAD, MACHINE, COMPARE, OUTPUT = "Load", "Hardware", "Comparison", "Output"
NARROW = 120
"""Columns of output that is no terminal."""


def simulate(
    file: Annotated[
        str,
        typer.Option(
            "--file", "-f", help="YAML file with the InferenceService, or - for standard input."
        ),
    ],
    *,
    service: Annotated[
        str,
        typer.Option(
            help="NAMESPACE/NAME of the service, if the file has several. Default: the only one."
        ),
    ] = "",
    namespace: Annotated[str, NAMESPACE] = "default",
    settings: Annotated[Path | None, SETTINGS] = None,
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
            max=10_000,
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
        str | None,
        typer.Option(
            help=f"Model and accelerators of a replica: a file with coefficients, or one of {', '.join(known_hardware())}. Default: that of a simulated engine profile.",
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
        int, typer.Option(min=1, max=100, help="Runs of each case.", rich_help_panel=COMPARE)
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
    """  # noqa: D301 - \b keeps the lines of the examples apart
    context = plan_inputs(settings)
    alternatives = understood("--against", lambda: parse_alternatives(against))
    what_ifs = understood("--what-if", lambda: parse_what_ifs(what_if or ()))
    faults = understood("--fault", lambda: parse_faults(fault or ()))
    options = LoadOptions(
        trace, scale, pattern, rate, _seconds(minutes, hours), prompt_tokens, output_tokens, tiers
    )
    checked = _only_service(read_inputs([file], context, namespace).checked, service)
    if fit_from_prometheus is not None:
        if hardware is not None:
            raise typer.BadParameter(
                "is measured with --fit-from-prometheus", param_hint="--hardware"
            )
        machine, options = _fitted(checked, fit_from_prometheus, fit_hours, options)
    elif hardware is None:
        machine = hardware_of_profile(checked)
    else:
        machine = read_hardware(hardware)
    cases, notes = cases_of(checked, machine, context, alternatives, what_ifs)
    if floor_s(machine) > tpot:
        raise typer.BadParameter(
            f"{tpot:g} s is below the shortest step of {machine.model} on {machine.name} ({floor_s(machine):.4f} s)",
            param_hint="--tpot",
        )
    check_start(cases, start)
    if checked.service is None:
        raise AssertionError("cases_of ends the command for an invalid service")
    load = read_load(options, cases[0].model, checked.service.spec.engine.max_model_length)
    batches, batch_notes = read_batches(batch or (), load.seconds)
    setting = Setting(
        load.load, load.seconds, Targets(ttft, tpot), seeds, faults, batches, load.line, start
    )
    if fixed_fleet is None:
        fixed_fleet = all(case.alternative.kind is not Kind.STATIC for case in cases)
    with _progress(cases, setting, searches=fixed_fleet) as progress:
        results = compare(cases, setting, progress)
        if fixed_fleet:
            fixed, fixed_notes = fixed_fleet_of(results, setting, progress)
            results, notes = results + fixed, notes + fixed_notes
    name = f"{checked.service.namespace}/{checked.service.name}"
    all_notes = (*notes, *load.notes, *batch_notes)
    report = Report(name, machine, load.text, setting, results, all_notes)
    _write(report, html, as_json=as_json)


def _seconds(minutes: float | None, hours: float | None) -> float | None:
    if minutes is not None and hours is not None:
        raise typer.BadParameter("give --minutes or --hours, not both", param_hint="--hours")
    if hours is not None:
        return 3600 * hours
    return None if minutes is None else 60 * minutes


def _only_service(checked: Sequence[Checked], wanted: str) -> Checked:
    """Return the service of the file, or the wanted one of several."""
    named = {_full_name(service): service for service in checked}
    if wanted:
        if wanted not in named:
            stop(
                ExitCode.NO_INPUT, f"--service {wanted}: not in the file; it has {', '.join(named)}"
            )
        return named[wanted]
    if len(checked) > 1:
        raise typer.BadParameter(
            f"the file has {plural(len(checked), 'service')}; choose one of {', '.join(named)}",
            param_hint="--service",
        )
    return checked[0]


def _full_name(checked: Checked) -> str:
    if checked.service is not None:
        return f"{checked.service.namespace}/{checked.service.name}"
    metadata = checked.document.manifest.get("metadata") or {}
    return f"{metadata.get('namespace') or 'default'}/{metadata.get('name', '')}"


def _fitted(
    checked: Checked, url: str, hours: float, options: LoadOptions
) -> tuple[Hardware, LoadOptions]:
    """Return the measured hardware, and the options with the measured load where none is given."""
    # Heavy; only this option needs it.
    from fleetkeeper.commands.simulate.prometheus_fit import NoFit, fit_from_prometheus  # noqa: PLC0415

    if checked.service is None or checked.profile is None:
        stop(ExitCode.BAD_INPUT, "\n".join(checked.complaints))
    service = checked.service
    try:
        found = fit_from_prometheus(url, service.namespace, service.name, hours)
    except NoFit as problem:
        stop(ExitCode.FAILED, str(problem))
    gpus = effective_resources(service.spec, checked.profile).accelerators
    model = service.spec.model.source.rpartition("://")[2]
    if options.pattern is not None:
        options = replace(
            options,
            rate=options.rate or found.requests_per_s,
            prompt_tokens=options.prompt_tokens or found.prompt_tokens,
            output_tokens=options.output_tokens or found.output_tokens,
        )
    return replace(found.hardware, gpus=gpus, model=model), options


@contextmanager
def _progress(cases: Sequence[Case], setting: Setting, *, searches: bool) -> Iterator[Progress]:
    """Show a bar on standard error if it is a terminal. `searches`: more runs follow for a fixed fleet."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    runs = len(cases) * setting.seeds
    if searches:
        # The bisection takes about so many runs; then comes the row of the fixed fleet.
        runs += cases[0].model.settings.max_replicas.bit_length() + setting.seeds
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulate", total=runs * setting.seconds)
        begun = 0

        def show(case: Case, seed: int, seconds: float) -> None:
            nonlocal begun
            begun += seconds == 0
            done = (begun - 1) * setting.seconds + seconds
            bar.update(task, completed=done, description=f"{case.name}, seed {seed}")

        yield show


def _write(report: Report, html: Path | None, *, as_json: bool) -> None:
    if html is not None:
        # Only this option needs its template engine.
        from fleetkeeper.simulate.report.page import report_page  # noqa: PLC0415

        try:
            html.write_text(report_page(report), "utf-8")
        except OSError as problem:
            stop(ExitCode.FAILED, f"{html}: cannot write the file: {problem.strerror}")
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, NARROW))
    console.print(report_tables(report))
