"""`fleetkeeper simulate-pool`: show what it costs to let many services sleep on few accelerators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from fleetkeeper.commands.service.inputs import Checked, checked_service, plan_inputs, read_inputs
from fleetkeeper.commands.service.render import FILES, SETTINGS
from fleetkeeper.commands.simulate.command import NARROW
from fleetkeeper.commands.simulate.inputs import (
    hardware_of_profile,
    read_hardware,
    read_model,
    understood,
)
from fleetkeeper.commands.simulate.services import chosen_services, service_key
from fleetkeeper.common.budget import Budget
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.simulate.arguments import WhatIf, changed_manifest, parse_what_ifs
from fleetkeeper.simulate.comparison import MAX_SEEDS
from fleetkeeper.simulate.loads.arrivals import Mix, poisson
from fleetkeeper.simulate.pool.comparison import (
    Case,
    Kind,
    Setting,
    compare,
    with_load,
    zipf_rates,
)
from fleetkeeper.simulate.pool.report import PoolReport
from fleetkeeper.simulate.pool.services import Member
from fleetkeeper.simulate.pool.sleepers import why_awake
from fleetkeeper_steps.hardware import Hardware, known_hardware

MAX_MODELS: Final = 1000
MAX_PER_DAY: Final = 1_000_000.0


def simulate_pool(
    file: Annotated[list[str], FILES],
    *,
    max_accelerators: Annotated[
        int, typer.Option(min=1, help="GPU budget that the services share.")
    ],
    models: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_MODELS,
            help="Play this many copies of the only service in the files. Default: the services in the files.",
        ),
    ] = None,
    requests_per_day: Annotated[
        float,
        typer.Option(
            min=1,
            max=MAX_PER_DAY,
            help="Requests of all services in a day: Poisson arrivals, a fifth of the highest rate at 2:00, the whole at 14:00.",
        ),
    ] = 500.0,
    zipf: Annotated[
        float,
        typer.Option(
            min=0,
            max=5,
            help="The N-th service gets requests in proportion to 1 / N to this power. 0: all get the same.",
        ),
    ] = 1.0,
    hours: Annotated[
        float, typer.Option(min=0.1, max=336, help="Length of the run in hours.")
    ] = 24.0,
    hardware: Annotated[
        str | None,
        typer.Option(
            help=f"Model and accelerators of a replica: a file with coefficients, or one of {', '.join(known_hardware())}. Default: that of a simulated engine profile.",
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Another value of a field of the spec: scaling.sleep.afterIdleSeconds=60,300. One run of Fleetkeeper per value. May be repeated.",
        ),
    ] = None,
    settings: Annotated[Path | None, SETTINGS] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MAX_SEEDS, help="Runs of each case.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with the figures of each service.")
    ] = False,
) -> None:
    """Show what it costs to let many services sleep on few accelerators. Requires no cluster.

    Fleetkeeper is compared with services that are always on, and with KEDA without a hold. The same options
    give the same report. Exit codes: 0 success; 2 an option is not understood; 64 a file has invalid
    content, or a service never sleeps or does not fit the hardware; 66 a file cannot be read.

    \b
    Examples:
      fleetkeeper simulate-pool -f chat.yaml --models 25 --max-accelerators 4 --hardware h100-8b
      fleetkeeper simulate-pool -f chat.yaml --models 25 --max-accelerators 4 --hardware h100-8b --requests-per-day 2000 --what-if scaling.sleep.afterIdleSeconds=60,300
    """  # noqa: D301 - \b keeps the lines of the examples apart
    context = plan_inputs(settings)
    budget = Budget(max_accelerators)
    what_ifs = understood("--what-if", lambda: parse_what_ifs(what_if or ()))
    chosen = chosen_services(read_inputs(file, context, "default").checked, "", budget)
    if models is not None and len(chosen) > 1:
        raise typer.BadParameter(
            f"needs a single service to copy, and there are {len(chosen)}", param_hint="--models"
        )
    machine = None if hardware is None else read_hardware(hardware)
    rates = zipf_rates(models or len(chosen), zipf, requests_per_day)

    def case(kind: Kind, changed: WhatIf | None = None) -> Case:
        members = [
            _member(name, _changed(checked, changed, context), machine, budget)
            for name, checked in chosen.items()
        ]
        text = changed.text if changed else ""
        return Case(kind, with_load(_copies(members, models), rates, Mix()), text)

    cases = [case(Kind.FLEETKEEPER), *(case(Kind.FLEETKEEPER, each) for each in what_ifs)]
    cases += [case(Kind.KEDA), case(Kind.ALWAYS_ON)]
    setting = Setting(budget, 3600.0 * hours, seeds)
    with _progress() as progress:
        results = compare(cases, setting, progress)
    text = f"{requests_per_day:g} requests a day, Zipf {zipf:g}"
    report = PoolReport(text, setting, results)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, NARROW))
    console.print(report.as_tables())


def _changed(checked: Checked, what_if: WhatIf | None, context: PlanContext) -> Checked:
    if what_if is None:
        return checked
    manifest = dict(checked.document.manifest)
    changed = understood("--what-if", partial(changed_manifest, manifest, what_if))
    return checked_service(replace(checked.document, manifest=changed), context, None)


def _member(name: str, checked: Checked, machine: Hardware | None, budget: Budget) -> Member:
    """Return a service of the files, without a load. End the command if it cannot be played."""
    model = read_model(checked, hardware_of_profile(checked) if machine is None else machine)
    if checked.service is None:
        raise AssertionError("read_model ends the command for an invalid service")
    spec, document = checked.service.spec, checked.document
    why = why_awake(spec)
    if why:
        stop(ExitCode.BAD_INPUT, f"{document.place('spec.scaling')}: {name} {why}")
    needed = spec.scaling.min_replicas * model.gpus
    if needed > (budget.total_gpus or 0):
        raise typer.BadParameter(
            f"{budget.total_gpus} is less than {name} needs while it is awake ({needed})",
            param_hint="--max-accelerators",
        )
    return Member(service_key(name), spec, model, poisson(lambda _: 0.0, 0.0, Mix()))


def _copies(members: Sequence[Member], models: int | None) -> Sequence[Member]:
    if models is None:
        return members
    (member,) = members
    namespace, name = member.key
    digits = len(str(models))
    names = [f"{name}-{number:0{digits}}" for number in range(1, models + 1)]
    return [replace(member, key=(namespace, each)) for each in names]


@contextmanager
def _progress() -> Iterator[Callable[[Case, int], None]]:
    """Show what is played on standard error if it is a terminal."""
    console = Console(stderr=True)
    with console.status("simulate-pool") as status:
        yield lambda case, seed: status.update(f"{case.name}, seed {seed}")
