"""Parses a service from its InferenceService.

The gateway may be older or newer than the operator and the CRD. So it reads only what it needs, and
treats unknown values as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fleetkeeper_contract import rfc3339
from fleetkeeper_contract.sleep import KEPT_STARTS, MAX_NUMBER, SleepState
from fleetkeeper_gateway.interfaces import Service, Sleeping
from fleetkeeper_gateway.kubernetes.watch import ObjectName

SERVICE_PORT: Final = 80
"""Port of the Service that the operator creates, with the name of the InferenceService."""
ACCESS_GATEWAY: Final = "Gateway"
WAKE_ALWAYS: Final = "Always"
READY: Final = "Ready"
STARTING: Final = "Starting"
SUSPENDED: Final = "Suspended"
DEGRADED: Final = "Degraded"
UNAVAILABLE: Final = "Unavailable"
UNKNOWN: Final = "Unknown"


def parse_service(place: ObjectName, found: Mapping[str, Any]) -> Service:
    """Return the service that an InferenceService describes. Only its name must be valid."""
    namespace, name = place
    spec, metadata = _map(found.get("spec")), _map(found.get("metadata"))
    status = _map(found.get("status"))
    conditions = _conditions(status)
    # The operator writes the address once it owns the Kubernetes Service. Before, anybody who may create
    # Services in the namespace could lead requests, and grants, to any other.
    has_address = bool(_text(status.get("url")))
    is_suspended = spec.get("suspend") is True or spec.get("replicas") == 0
    sleep = None if is_suspended else _sleep(_map(status.get("sleep")))
    return Service(
        namespace=namespace,
        name=name,
        uid=_text(metadata.get("uid")),
        models=_models(name, _map(spec.get("model"))),
        url=f"http://{name}.{namespace}.svc:{SERVICE_PORT}" if has_address else "",
        demands_grant=spec.get("access") == ACCESS_GATEWAY,
        state=SUSPENDED if is_suspended else _state(conditions, sleep, has_address=has_address),
        ready=has_address and conditions.get("Available") == "True",
        created=int(rfc3339.parse(metadata.get("creationTimestamp")) or 0),
        sleep=sleep,
        wakes_for_batch=_map(_map(spec.get("scaling")).get("sleep")).get("wakeForBatch")
        == WAKE_ALWAYS,
    )


def _models(name: str, model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the served name, which is the service's by default, and the names of the adapters."""
    adapters = model.get("adapters")
    names = [_text(model.get("servedName")) or name]
    names += [
        _text(_map(adapter).get("name"))
        for adapter in (adapters if isinstance(adapters, list) else ())
    ]
    return tuple(dict.fromkeys(filter(None, names)))


def _state(conditions: Mapping[str, str], sleep: Sleeping | None, *, has_address: bool) -> str:
    if sleep is not None and sleep.state is not SleepState.GOING_TO_SLEEP:
        return sleep.state.value
    available = conditions.get("Available")
    if available == "True" and not has_address:
        return UNAVAILABLE
    if available == "True":
        return DEGRADED if conditions.get("Degraded") == "True" else READY
    if available != "False":
        return UNKNOWN
    return STARTING if conditions.get("Progressing") == "True" else UNAVAILABLE


def _sleep(found: Mapping[str, Any]) -> Sleeping | None:
    number, state, starts = (
        _whole(found.get("number")),
        _text(found.get("state")),
        found.get("startSeconds"),
    )
    if state not in set(SleepState) or not 0 < number <= MAX_NUMBER:
        return None
    return Sleeping(
        number=number,
        state=SleepState(state),
        failures=_whole(found.get("failures")),
        starts=tuple(map(_whole, starts))[-KEPT_STARTS:] if isinstance(starts, list) else (),
    )


def _conditions(status: Mapping[str, Any]) -> dict[str, str]:
    found = status.get("conditions")
    return {
        _text(condition.get("type")): _text(condition.get("status"))
        for condition in map(_map, found if isinstance(found, list) else ())
    }


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
