"""The common input of `render` and `check`: services and errors from files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from fleetkeeper.api.options import option_errors
from fleetkeeper.api.parse import InferenceService, InvalidService
from fleetkeeper.api.profiles.defaults import simulated_catalog
from fleetkeeper.api.profiles.profile import EngineProfile, UnknownProfile
from fleetkeeper.api.schema.error_messages import FieldError
from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.commands.service.service_files import Document, UnreadableFile, read_documents
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.reconcile.context import PlanContext, default_context
from fleetkeeper.reconcile.wanted import refusals, settings_refusals

NO_UID = "00000000-0000-0000-0000-000000000000"
"""A placeholder for the UID that the API server assigns to the service."""


@dataclass(frozen=True, slots=True)
class Checked:
    """An InferenceService of a file: valid with its profile, or invalid with its errors."""

    document: Document
    service: InferenceService | None = None
    profile: EngineProfile | None = None
    errors: tuple[FieldError, ...] = ()

    @property
    def complaints(self) -> list[str]:
        """Return the errors as `FILE:LINE: FIELD: MESSAGE`, in the order of the file."""
        placed = [(self.document.place(error.path), str(error)) for error in self.errors]
        placed.sort(key=lambda pair: int(pair[0].rpartition(":")[2]))
        return [f"{place}: {text}" for place, text in placed]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The services of all files, and the objects that are not InferenceServices."""

    checked: tuple[Checked, ...] = ()
    others: tuple[Document, ...] = field(default_factory=tuple)

    @property
    def complaints(self) -> list[str]:
        """Return the errors of all services."""
        return [text for checked in self.checked for text in checked.complaints]


def plan_inputs(settings: Path | None) -> PlanContext:
    """Return the operator's context from its settings file, or by default that of the Helm chart.

    The default includes the simulated engine profile, which is off in the chart: `check` says so.
    """
    if settings is None:
        return replace(default_context(), catalog=simulated_catalog())
    # Heavy; only needed with a settings file.
    from fleetkeeper.runtime.plan_context import plan_context  # noqa: PLC0415
    from fleetkeeper.runtime.settings import SettingsError, load_settings  # noqa: PLC0415

    try:
        return plan_context(load_settings(settings))
    except SettingsError as problem:
        stop(ExitCode.BAD_INPUT, str(problem))


def read_inputs(files: list[str], context: PlanContext, namespace: str | None) -> Inputs:
    """Read and validate all InferenceServices in the files. Exit the command if there are none."""
    checked: list[Checked] = []
    others: list[Document] = []
    for file in files:
        try:
            documents = read_documents(file)
        except UnreadableFile as problem:
            stop(ExitCode.NO_INPUT, str(problem))
        for document in documents:
            if document.is_service:
                checked.append(checked_service(document, context, namespace))
            else:
                others.append(document)
    if not checked:
        found = "".join(f"\n{other.described}" for other in others if other.is_namesake)
        text = f"{', '.join(files)}: no InferenceService of fleetkeeper.io found"
        stop(ExitCode.NO_INPUT, f"{text}{found}")
    return Inputs(tuple(checked), tuple(others))


def checked_service(document: Document, context: PlanContext, namespace: str | None) -> Checked:
    """Return a document's service with its profile, or its errors. `namespace`: if it sets none."""
    try:
        service = document.service(allow_floating_revisions=context.floating_revisions)
    except InvalidService as problem:
        return Checked(document, errors=(*problem.errors, *_further_errors(problem, context)))
    try:
        profile = context.catalog.resolve(_profile_name(service))
    except UnknownProfile as problem:
        return Checked(document, errors=tuple(_without_profile(problem, service.spec, context)))
    errors = tuple(refusals(service.spec, profile, context))
    if errors:
        return Checked(document, errors=errors)
    if not (document.manifest.get("metadata") or {}).get("namespace") and namespace:
        service = replace(service, namespace=namespace)
    return Checked(document, replace(service, uid=service.uid or NO_UID), profile)


def _further_errors(problem: InvalidService, context: PlanContext) -> list[FieldError]:
    """Return what profile and settings refuse in the sound part of an invalid service."""
    spec, part = problem.spec, problem.part
    if spec is None:
        return []
    try:
        errors = refusals(spec, context.catalog.resolve(spec.engine.profile), context)
    except UnknownProfile as unknown:
        errors = _without_profile(unknown, spec, context)
    known = {str(error) for error in problem.errors}
    errors = part.remaining(errors) if part else errors
    return [error for error in errors if str(error) not in known]


def _without_profile(
    problem: UnknownProfile, spec: InferenceServiceSpec, context: PlanContext
) -> list[FieldError]:
    """Return the error of an unknown profile, and the errors that no profile would change."""
    unknown = FieldError("spec.engine.profile", str(problem))
    return [unknown, *option_errors(spec.engine.options), *settings_refusals(spec, context)]


def _profile_name(service: InferenceService) -> str:
    """Return the profile in the service's status if the spec still requests the same alias."""
    asked, engine = service.spec.engine.profile, service.status.get("engine") or {}
    return str(engine.get("profile") or asked) if engine.get("requested") == asked else asked
