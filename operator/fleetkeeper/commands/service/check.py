"""`fleetkeeper check`: validate InferenceServices and show the resources that they require."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.profiles.simulation import Simulation
from fleetkeeper.commands.service.advice import advice_of
from fleetkeeper.commands.service.inputs import Checked, plan_inputs, read_inputs
from fleetkeeper.commands.service.needs import Needs, needs_of
from fleetkeeper.commands.service.pod_template_lines import overridden, pod_template_lines
from fleetkeeper.commands.service.render import FILES, NAMESPACE, SETTINGS
from fleetkeeper.exit_codes import ExitCode
from fleetkeeper.reconcile.context import PlanContext


def check(
    file: Annotated[list[str], FILES],
    namespace: Annotated[str, NAMESPACE] = "default",
    settings: Annotated[Path | None, SETTINGS] = None,
) -> None:
    """Validate InferenceServices and show the resources that they require. Requires no cluster.

    \b
    Examples:
      fleetkeeper check -f chat.yaml
      fleetkeeper check -f a.yaml -f b.yaml --settings operator.yaml
      helm template my-chart | fleetkeeper check -f -
    """  # noqa: D301 - \b keeps the lines of the examples apart
    context = plan_inputs(settings)
    inputs = read_inputs(file, context, namespace)
    for other in inputs.others:
        typer.echo(f"{other.described}: skipped")
    for checked in inputs.checked:
        typer.echo("\n".join(report(checked, context)))
    if inputs.complaints:
        mistakes = len(inputs.complaints)
        typer.echo(f"{mistakes} error{'s' * (mistakes > 1)}", err=True)
        raise typer.Exit(ExitCode.BAD_INPUT.value)


def report(checked: Checked, context: PlanContext) -> list[str]:
    """Return the lines of output for a service."""
    if checked.service is None or checked.profile is None:
        return checked.complaints
    service, needs = checked.service, needs_of(checked.service, checked.profile)
    lines = [
        f"{checked.document.place('')}: {service.namespace}/{service.name}: OK",
        f"  engine       {_engine(needs.profile)}, profile {needs.profile.name}",
        f"  replicas     {_span(needs)}",
        *_accelerator_lines(needs),
        f"  CPU cores    {_times(needs, _plain(needs.cores(1)), _plain(needs.cores(needs.most)))}",
        f"  memory       {_times(needs, _gib(needs.memory_gib(1)), _gib(needs.memory_gib(needs.most)))}",
        f"  memory cap   {_cap(needs)}",
        *pod_template_lines(checked.profile),
    ]
    notes = [*advice_of(service, needs, context), *overridden(service, checked.profile)]
    return [*lines, *(f"  note         {text}" for text in notes)]


def _engine(profile: EngineProfile) -> str:
    if not profile.simulated:
        return f"vLLM {profile.vllm_version}"
    of = profile.simulation or Simulation()
    costs = "own step times" if of.costs else f"step times of {of.hardware}"
    faults = f", faults {' '.join(fault.kind for fault in of.faults)}" if of.faults else ""
    return f"simulated ({costs}, speed {of.speed:g}{faults})"


def _span(needs: Needs) -> str:
    if needs.least == needs.most:
        return f"{needs.most}" + (" (stopped)" if needs.most == 0 else "")
    return f"{needs.least} to {needs.most}"


def _accelerator_lines(needs: Needs) -> list[str]:
    accelerator, count = needs.resources.accelerator, needs.resources.accelerators
    if not count:
        return []
    kind = accelerator.resource if accelerator else "from resources.claims"
    most = needs.accelerators(needs.most)
    lines = [f"  accelerators {needs.most} x {count} = {most} {kind} at most"]
    if needs.surge and needs.most:
        more = needs.accelerators(needs.surge)
        lines.append(
            f"               {more} more during a rollout (rollout.maxSurge is {needs.max_surge}); none with rollout.strategy Replace or Swap"
        )
    return lines


def _times(needs: Needs, one: str, all_of_them: str) -> str:
    return f"{needs.most} x {one} = {all_of_them} at most"


def _cap(needs: Needs) -> str:
    whole = needs.memory_gib(1)
    capped = needs.capped_memory_gib
    if capped is None:
        return f"{needs.cap_percent}% of each accelerator's memory, for weights, KV cache, and everything else"
    return f"{needs.cap_percent}% x {_gib(whole)} = {_gib(capped)} in each replica, for weights, KV cache, and everything else"


def _plain(value: Decimal) -> str:
    return f"{value.normalize():f}"


def _gib(value: Decimal) -> str:
    return f"{float(value):.1f} GiB"
