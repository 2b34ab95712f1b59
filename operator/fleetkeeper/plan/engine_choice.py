"""Which engine profile a service runs on.

An alias is resolved when a service is made and when its pods change anyway; the answer stands in
`status.engine` and is an input from then on. So neither an upgrade of the operator nor a
`kubectl scale` restarts an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fleetkeeper.api.profile import EngineProfile, ProfileCatalog, UnknownProfile
from fleetkeeper.api.types import EngineUpdates, InferenceServiceSpec


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """What `status.engine` remembers: the profile in force and the name it was resolved from."""

    profile: str
    requested: str


@dataclass(frozen=True, slots=True)
class EngineDecision:
    """The profile in force, None when there is none of that name; then `message` says what to do.

    `update_available` names the newer profile behind the alias, "" when there is none.
    """

    profile: EngineProfile | None
    requested: str
    update_available: str = ""
    message: str = ""

    def to_status(self) -> dict[str, Any]:
        """As `status.engine` holds it."""
        if self.profile is None:
            return {}
        told = {
            "profile": self.profile.name,
            "requested": self.requested,
            "version": self.profile.vllm_version,
        }
        return {**told, "updateAvailable": self.update_available} if self.update_available else told


def parse_engine(status: Mapping[str, Any]) -> KnownEngine | None:
    """`status.engine`, None when it is absent or unreadable."""
    part = status.get("engine")
    if not isinstance(part, Mapping) or not part.get("profile"):
        return None
    return KnownEngine(str(part["profile"]), str(part.get("requested") or ""))


def decide_engine(
    spec: InferenceServiceSpec,
    known: KnownEngine | None,
    catalog: ProfileCatalog,
    *,
    is_new_generation: bool,
    runs_unchanged_on: Callable[[EngineProfile], bool],
    may_update: bool = False,
) -> EngineDecision:
    """The profile in force.

    `runs_unchanged_on` says whether the pod template that the spec asks for on this profile is the
    one that runs (or was rolled back) already: then the change of the spec does not concern the
    pods, and the profile stays. `may_update` is this service's turn of an automatic update.
    """
    requested = spec.engine.profile
    newest, problem = _resolve(catalog, requested)
    if known is None or known.requested != requested:
        return EngineDecision(newest, requested, message=problem)
    kept = _exact(catalog, known.profile)
    if kept is None:
        return EngineDecision(None, requested, message=_dropped(known, newest))
    if newest is None or newest.name == kept.name:
        return EngineDecision(kept, requested)
    is_automatic = spec.rollout.engine_updates is EngineUpdates.AUTOMATIC
    if is_automatic and may_update:
        return EngineDecision(newest, requested)
    if is_new_generation and not runs_unchanged_on(kept):
        return EngineDecision(newest, requested)
    return EngineDecision(kept, requested, update_available=newest.name)


def _resolve(catalog: ProfileCatalog, name: str) -> tuple[EngineProfile | None, str]:
    try:
        return catalog.resolve(name), ""
    except UnknownProfile as problem:
        return None, f"{problem}. Choose one of them as spec.engine.profile."


def _exact(catalog: ProfileCatalog, name: str) -> EngineProfile | None:
    return next((profile for profile in catalog.profiles if profile.name == name), None)


def _dropped(known: KnownEngine, newest: EngineProfile | None) -> str:
    """What to do when the operator no longer has the profile that runs."""
    instead = f", or set spec.engine.profile to {newest.name}" if newest else ""
    return (
        f"The engine profile {known.profile} that runs is no longer among the operator's settings. "
        f"Restore it{instead}."
    )
