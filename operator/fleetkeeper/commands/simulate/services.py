"""The services of `fleetkeeper simulate`: which of the files, their hardware, and the GPU budget that they share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import typer

from fleetkeeper.api.profiles.profile import effective_resources
from fleetkeeper.commands.service.inputs import Checked
from fleetkeeper.commands.simulate.inputs import LoadOptions, hardware_of_profile, read_hardware
from fleetkeeper.common.budget import Budget, Holding, ServiceKey, Usage, exceeds
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper_steps.hardware import Hardware, floor_s


def chosen_services(checked: Sequence[Checked], wanted: str, budget: Budget) -> dict[str, Checked]:
    """Return the services to play by namespace and name: the wanted one, the only one, or all under a budget."""
    named: dict[str, Checked] = {}
    for service in checked:
        name = _full_name(service)
        if name in named:
            first = named[name].document.place("metadata.name")
            place = service.document.place("metadata.name")
            stop(ExitCode.BAD_INPUT, f"{place}: {name} is already at {first}; remove one of them")
        named[name] = service
    if wanted:
        if wanted not in named:
            stop(
                ExitCode.NO_INPUT, f"--service {wanted}: not in the file; it has {', '.join(named)}"
            )
        return {wanted: named[wanted]}
    if len(named) > 1 and not budget.is_bounded:
        raise typer.BadParameter(
            f"there are {len(named)} services; choose one of {', '.join(named)}, "
            "or give the GPU budget that they share with --max-accelerators",
            param_hint="--service",
        )
    return named


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


def machine_of(
    checked: Checked, named: str | None, url: str | None, hours: float, options: LoadOptions
) -> tuple[Hardware, LoadOptions]:
    """Return the hardware of a service, and the options of its load with what was measured."""
    if url is not None:
        return _fitted(checked, url, hours, options)
    return hardware_of_profile(checked) if named is None else read_hardware(named), options


def check_floor(machine: Hardware, tpot_s: float) -> None:
    """End the command if no request can have so short a time per token on the hardware."""
    if floor_s(machine) > tpot_s:
        raise typer.BadParameter(
            f"{tpot_s:g} s is below the shortest step of {machine.model} on {machine.name} ({floor_s(machine):.4f} s)",
            param_hint="--tpot",
        )


def check_budget(budget: Budget, gpus: Mapping[str, int]) -> None:
    """End the command if a budget has not the accelerators of all services at the start."""
    usage = Usage(budget, {service_key(name): Holding(needed) for name, needed in gpus.items()})
    for name, needed in gpus.items():
        allowance = usage.allowance(service_key(name))
        if exceeds(needed, 0, allowance):
            each = ", ".join(f"{name} {needed}" for name, needed in gpus.items())
            raise typer.BadParameter(
                f"{allowance.by} is less than the replicas need at the start ({each}); "
                "raise it, or lower scaling.minReplicas or --start",
                param_hint="--max-accelerators",
            )


def service_key(full_name: str) -> ServiceKey:
    """Return the key of NAMESPACE/NAME."""
    namespace, _, name = full_name.partition("/")
    return namespace, name


def share_of(budget: Budget, name: str, names: Collection[str]) -> int | None:
    """Return the accelerators of a service if each has an equal share of its budgets. None: no bound."""
    namespace, _ = service_key(name)
    near = [other for other in names if service_key(other)[0] == namespace]
    bounds = ((budget.total_gpus, names), (budget.of_namespace(namespace), near))
    return min([gpus // len(sharing) for gpus, sharing in bounds if gpus is not None], default=None)
