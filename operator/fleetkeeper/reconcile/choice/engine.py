"""The choice of a service's engine profile.

An alias is resolved when a service is created and when its pods change anyway. The result is stored
in `status.engine` and is an input from then on, so neither an upgrade of the operator nor a
`kubectl scale` restarts an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetkeeper.api.profiles.profile import EngineProfile, ProfileCatalog, UnknownProfile
from fleetkeeper.api.types import EngineUpdates, InferenceServiceSpec


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """The content of `status.engine`: the profile in use and the name that resolved to it."""

    profile: str
    requested: str


@dataclass(frozen=True, slots=True)
class EngineDecision:
    """The profile in use.

    `profile` is None if no profile has the requested name; then `message` says what to do.
    `newer` is the newer profile behind the alias, None if there is none.
    """

    profile: EngineProfile | None
    requested: str
    newer: EngineProfile | None = None
    message: str = ""

    def to_status(self) -> dict[str, Any]:
        """Return the content of `status.engine`."""
        if self.profile is None:
            return {}
        return {
            "profile": self.profile.name,
            "requested": self.requested,
            "version": self.profile.vllm_version,
            **({"updateAvailable": self.newer.name} if self.newer else {}),
            **({"simulated": True} if self.profile.simulated else {}),
        }


def parse_engine(status: Mapping[str, Any]) -> KnownEngine | None:
    """Parse `status.engine`, None if it is absent or unreadable."""
    part = status.get("engine")
    if not isinstance(part, Mapping) or not part.get("profile"):
        return None
    return KnownEngine(str(part["profile"]), str(part.get("requested") or ""))


def decide_engine(
    spec: InferenceServiceSpec,
    known: KnownEngine | None,
    catalog: ProfileCatalog,
    *,
    may_update: bool = False,
) -> EngineDecision:
    """Decide which profile the service uses: the known one, unless the spec names another.

    `may_update` is True if an automatic update may now change this service.
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
    if may_update and spec.rollout.engine_updates is EngineUpdates.AUTOMATIC:
        return EngineDecision(newest, requested)
    return EngineDecision(kept, requested, newer=newest)


def _resolve(catalog: ProfileCatalog, name: str) -> tuple[EngineProfile | None, str]:
    try:
        return catalog.resolve(name), ""
    except UnknownProfile as problem:
        return None, f"{problem}. Set spec.engine.profile to one of them."


def _exact(catalog: ProfileCatalog, name: str) -> EngineProfile | None:
    return next((profile for profile in catalog.profiles if profile.name == name), None)


def _dropped(known: KnownEngine, newest: EngineProfile | None) -> str:
    """Return the message for a profile in use that the operator's settings no longer contain."""
    instead = f", or set spec.engine.profile to {newest.name}" if newest else ""
    return (
        f"Engine profile {known.profile} is in use, but missing from the operator's settings. "
        f"Restore it there{instead}."
    )
