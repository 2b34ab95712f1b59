"""The input of `fleetkeeper simulate`: service, hardware, load and cases, from options and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final, TypeVar

import typer

from fleetkeeper.api.profiles.profile import effective_resources
from fleetkeeper.api.profiles.simulation import Simulation
from fleetkeeper.commands.service.inputs import Checked, checked_service
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.simulate.arguments import (
    LOADS,
    Alternative,
    BadArgument,
    Batch,
    WhatIf,
    changed_manifest,
    parse_batches,
    parse_load,
    parse_tiers,
)
from fleetkeeper.simulate.closed_loop import Load
from fleetkeeper.simulate.comparison import Case
from fleetkeeper.simulate.hardware import parse_hardware
from fleetkeeper.simulate.loads.arrivals import Mix, poisson, retiered, scaled
from fleetkeeper.simulate.loads.patterns import Pattern, rate_of
from fleetkeeper.simulate.loads.trace_file import BadTrace, Trace, parse_trace
from fleetkeeper.simulate.service_model import (
    ServiceModel,
    UnfitService,
    model_of,
    simulated_hardware,
)
from fleetkeeper_steps.hardware import Hardware, InvalidHardware, known_hardware

T = TypeVar("T")
DEFAULT_RATE: Final = 10.0
DEFAULT_PROMPT: Final = 1000.0
DEFAULT_OUTPUT: Final = 200.0


@dataclass(frozen=True, slots=True)
class PlayedLoad:
    """A load, its length, its description, and what the user should know about it.

    `line`: the tokens of a line of a batch, as those of the load on average.
    """

    load: Load
    seconds: float
    text: str
    line: Mix
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options that describe the load. None: not given."""

    trace: Path | None = None
    scale: float = 1.0
    pattern: Pattern | None = None
    rate: float | None = None
    seconds: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    tiers: str | None = None


def understood(option: str, parse: Callable[[], T]) -> T:
    """Return what `parse` returns; end the command with the usage of `option` if it raises BadArgument."""
    try:
        return parse()
    except BadArgument as problem:
        raise typer.BadParameter(str(problem), param_hint=option) from problem


def refuse(*options: tuple[str, object], why: str) -> None:
    """End the command with the usage of the first option that is given."""
    for option, given in options:
        if given:
            raise typer.BadParameter(why, param_hint=option)


def read_hardware(text: str) -> Hardware:
    """Return the hardware of a name or a file. End the command if there is none."""
    names = known_hardware()
    if text in names:
        return names[text]
    path = Path(text)
    if not path.exists():
        raise typer.BadParameter(
            f"{text!r} is neither a file nor known hardware; known: {', '.join(names)}",
            param_hint="--hardware",
        )
    try:
        return parse_hardware(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        stop(ExitCode.NO_INPUT, f"{text}: cannot read the file: {_why(problem)}")
    except InvalidHardware as problem:
        stop(ExitCode.BAD_INPUT, f"{text}: {problem}")


def hardware_of_profile(checked: Checked) -> Hardware:
    """Return the hardware of the service's simulated profile. End the command if it has none."""
    if checked.profile is None or not checked.profile.simulated:
        raise typer.BadParameter(
            f"is missing; give a file or one of {', '.join(known_hardware())}",
            param_hint="--hardware",
        )
    return simulated_hardware(checked.profile.simulation or Simulation())


def load_of_service(text: str | None, options: LoadOptions) -> LoadOptions:
    """Return the options with the load of a service's own text, if it has one."""
    if text is None:
        return options
    given = understood("--load", lambda: parse_load(text))
    if given is not None:
        pattern, (rate, prompt, output) = given
        own = replace(options, pattern=pattern, rate=rate)
        return replace(own, prompt_tokens=prompt, output_tokens=output)
    if not Path(text).exists():
        raise typer.BadParameter(
            f"{text!r} is neither a file nor a pattern; write {LOADS}", param_hint="--load"
        )
    return replace(options, trace=Path(text))


def read_load(options: LoadOptions, model: ServiceModel, longest: int | None) -> PlayedLoad:
    """Return the load of a trace or a pattern. `longest`: tokens of the longest request that vLLM takes."""
    if (options.trace is None) == (options.pattern is None):
        raise typer.BadParameter(
            "give either --trace or --pattern, or --load", param_hint="--trace"
        )
    if options.trace is not None:
        return _trace_load(options, options.trace, model, longest)
    return _pattern_load(options, options.pattern or Pattern.CONSTANT, model)


def _pattern_load(options: LoadOptions, pattern: Pattern, model: ServiceModel) -> PlayedLoad:
    if options.scale != 1.0:
        raise typer.BadParameter("needs --trace; use --rate with a pattern", param_hint="--scale")
    tiers = (0.0, 1.0, 0.0)
    if options.tiers is not None:
        text = options.tiers
        tiers = understood("--tiers", lambda: parse_tiers(text))
    mix = Mix(
        options.prompt_tokens or DEFAULT_PROMPT, options.output_tokens or DEFAULT_OUTPUT, tiers
    )
    if mix.prompt + mix.generated > model.engine.kv_capacity_tokens:
        raise typer.BadParameter(
            f"{mix.prompt + mix.generated:.0f} tokens exceed a replica's KV cache "
            f"({model.engine.kv_capacity_tokens:.0f})",
            param_hint="--prompt-tokens",
        )
    rate = DEFAULT_RATE if options.rate is None else options.rate
    seconds = pattern.usual_s if options.seconds is None else options.seconds
    text = f"{pattern} up to {rate:g} requests/s, {mix.prompt:.0f} prompt and {mix.generated:.0f} output tokens on average"
    return PlayedLoad(poisson(rate_of(pattern, rate, seconds), rate, mix), seconds, text, mix)


def _trace_load(
    options: LoadOptions, path: Path, model: ServiceModel, longest: int | None
) -> PlayedLoad:
    for option, value in (
        ("--rate", options.rate),
        ("--prompt-tokens", options.prompt_tokens),
        ("--output-tokens", options.output_tokens),
    ):
        if value is not None:
            raise typer.BadParameter("needs --pattern; a trace has its own", param_hint=option)
    trace = _read_trace(path, model.engine.kv_capacity_tokens)
    notes = list(trace.notes)
    if longest is not None:
        trace, left_out = _without_long(path, trace, longest)
        notes += left_out
    load = scaled(trace.rows, options.scale)
    if options.tiers is not None:
        if trace.has_tiers:
            raise typer.BadParameter(f"{path} has a column tier", param_hint="--tiers")
        text = options.tiers
        load = retiered(load, understood("--tiers", lambda: parse_tiers(text)))
    seconds = trace.seconds + 1.0
    if options.seconds is not None:
        if options.seconds > seconds:
            notes.append(f"{path} ends after {seconds:.0f} s: the run ends there")
        seconds = min(seconds, options.seconds)
    count = f"{len(trace.rows):,} requests" + f" x {options.scale:g}" * (options.scale != 1.0)
    line = Mix(fmean(row[2] for row in trace.rows), fmean(row[3] for row in trace.rows))
    return PlayedLoad(load, seconds, f"trace {path.name} ({count})", line, tuple(notes))


def read_batches(texts: Sequence[str], seconds: float) -> tuple[tuple[Batch, ...], tuple[str, ...]]:
    """Return the batches of a run of so many seconds, and notes about them."""
    batches = understood("--batch", lambda: parse_batches(texts))
    notes = []
    for batch in batches:
        if batch.start_s >= seconds:
            raise typer.BadParameter(
                f"{batch.text!r} starts after the end of the run ({seconds:.0f} s)",
                param_hint="--batch",
            )
        if batch.deadline_s > seconds:
            notes.append(f"batch {batch.text}: the run ends before its deadline")
    return batches, tuple(notes)


def _read_trace(path: Path, kv_capacity_tokens: float) -> Trace:
    try:
        return parse_trace(str(path), path.read_bytes(), kv_capacity_tokens)
    except OSError as problem:
        stop(ExitCode.NO_INPUT, f"{path}: cannot read the file: {_why(problem)}")
    except BadTrace as problem:
        stop(ExitCode.BAD_INPUT, str(problem))


def _without_long(path: Path, trace: Trace, longest: int) -> tuple[Trace, tuple[str, ...]]:
    """Leave out requests that vLLM refuses with status 400: longer than engine.maxModelLength."""
    rows = tuple(row for row in trace.rows if row[2] + row[3] <= longest)
    left_out = len(trace.rows) - len(rows)
    if not rows:
        stop(
            ExitCode.BAD_INPUT,
            f"{path}: every request is longer than engine.maxModelLength ({longest})",
        )
    if not left_out:
        return trace, ()
    note = f"{left_out:,} of {len(trace.rows):,} requests are longer than engine.maxModelLength ({longest}): left out, as vLLM refuses them"
    return replace(trace, rows=rows), (note,)


def read_model(checked: Checked, hardware: Hardware, *, origin: str = "") -> ServiceModel:
    """Return the model of a service; end the command if it is invalid or does not fit the hardware.

    `origin`: what precedes messages, for example the what-if that made it.
    """
    if checked.service is None or checked.profile is None:
        stop(ExitCode.BAD_INPUT, "\n".join(f"{origin}{text}" for text in checked.complaints))
    spec = checked.service.spec
    gpus = effective_resources(spec, checked.profile).accelerators
    if checked.profile.simulated:
        gpus = hardware.gpus
    try:
        return model_of(spec, checked.service.generation, hardware, gpus)
    except UnfitService as problem:
        place = checked.document.place(problem.error.path)
        stop(ExitCode.BAD_INPUT, f"{origin}{place}: {problem}")


def cases_of(
    checked: Checked,
    hardware: Hardware,
    context: PlanContext,
    alternatives: tuple[Alternative, ...],
    what_ifs: tuple[WhatIf, ...],
) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """Return Fleetkeeper, the what-ifs and the alternatives, in this order, and notes for the user."""
    model = read_model(checked, hardware)
    cases, notes = [Case(model)], list(model.notes)
    for what_if in what_ifs:
        origin = f"--what-if {what_if.text}: "
        manifest = dict(checked.document.manifest)
        changed = understood("--what-if", partial(changed_manifest, manifest, what_if))
        document = replace(checked.document, manifest=changed)
        other = read_model(checked_service(document, context, None), hardware, origin=origin)
        if replace(other, notes=()) == replace(model, notes=()):
            notes.append(f"{origin}changes nothing that the simulation contains")
        cases.append(Case(other, what_if=what_if.text))
    return (*cases, *(Case(model, alternative) for alternative in alternatives)), tuple(notes)


def check_start(cases: Sequence[Case], start: int | None) -> None:
    """End the command if a case cannot begin with so many replicas."""
    if start is None:
        return
    for case in cases:
        least, most = case.model.settings.min_replicas, case.model.settings.max_replicas
        if not least <= start <= most:
            with_what = f" with {case.what_if}" if case.what_if else ""
            raise typer.BadParameter(
                f"{start} is not within scaling.minReplicas and scaling.maxReplicas{with_what}; "
                f"write a number from {least} to {most}",
                param_hint="--start",
            )


def _why(problem: Exception) -> str:
    return str(problem.strerror) if isinstance(problem, OSError) else "not UTF-8 text"
