"""The values that `top` and `explain` show, from services and the gauges of the control loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fleetkeeper.common.sleep import Sleep, parse_sleep
from fleetkeeper.common.values import change_in_words
from fleetkeeper_contract import rfc3339
from fleetkeeper_kube.reading import UNREAD, stand_in

PREFIX = "fleetkeeper_"
ServiceKey = tuple[str, str]
Gauges = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement and its objective in seconds. None means unknown."""

    value_s: float | None
    objective_s: float | None

    @property
    def is_broken(self) -> bool:
        """Return True if the measurement exceeds its objective."""
        return (
            self.value_s is not None
            and self.objective_s is not None
            and self.value_s > self.objective_s
        )


@dataclass(frozen=True, slots=True)
class Change:
    """An entry of `status.decisions`."""

    time: str
    what: str
    before: str
    after: str
    reason: str

    def in_words(self) -> str:
        """Format as `replicas 2 -> 3 (QueueWaitAboveTarget)`."""
        return change_in_words(self.what, self.before, self.after, self.reason)


@dataclass(frozen=True, slots=True)
class ServiceView:
    """The displayed values of a service."""

    namespace: str
    name: str
    ready: str
    wanted: str
    queue_wait: Measured
    batch_time: Measured
    ttft_s: float | None
    itl_s: float | None
    sequences: str
    tokens: str
    breaker: str
    conditions: Mapping[str, Mapping[str, Any]]
    status: Mapping[str, Any]
    gauges: Gauges = field(default_factory=dict)
    changes: tuple[Change, ...] = ()

    @property
    def title(self) -> str:
        """Return the namespace and the name, and that the engines are simulated if they are."""
        mark = " (simulated)" if self.is_simulated else ""
        return f"{self.namespace}/{self.name}{mark}"

    @property
    def is_simulated(self) -> bool:
        """Return True if no model answers."""
        return _section(self.status, "engine").get("simulated") is True

    @property
    def sleep(self) -> Sleep:
        """Return the sleep of the service."""
        return parse_sleep(self.status)

    def gauge(self, name: str, **labels: str) -> float | None:
        """Return the gauge with this name (without prefix) and labels, None if it is not exported."""
        return self.gauges.get((name, tuple(sorted(labels.items()))))


def parse_gauges(exposition: str) -> dict[ServiceKey, dict[tuple[str, Any], float]]:
    """Return the gauges with the labels service_namespace and inference_service, grouped by service.

    Raises:
        ValueError: The text is not in Prometheus' text format.
    """
    found: dict[ServiceKey, dict[tuple[str, Any], float]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels = dict(sample.labels)
            key = (labels.pop("service_namespace", ""), labels.pop("inference_service", ""))
            if all(key) and sample.name.startswith(PREFIX):
                name = sample.name.removeprefix(PREFIX)
                found.setdefault(key, {})[name, tuple(sorted(labels.items()))] = sample.value
    return found


def _section(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = status.get(name)
    return part if isinstance(part, Mapping) else {}


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _changes(status: Mapping[str, Any]) -> tuple[Change, ...]:
    return tuple(
        Change(*(str(row.get(key, "")) for key in ("time", "what", "from", "to", "reason")))
        for row in status.get("decisions") or ()
    )


def view_of(resource: Mapping[str, Any], gauges: Gauges) -> ServiceView:
    """Return the view of a service from its API object and its gauges (possibly empty).

    The view of a service that could not be read says so in its condition Ready.
    """
    if UNREAD in resource:
        resource = {"metadata": resource["metadata"], "status": _unreadable(resource[UNREAD])}
    meta, status = resource["metadata"], resource.get("status") or {}
    objectives = _section(resource.get("spec") or {}, "objectives")

    def measured(signal: str, objective: str) -> Measured:
        limit = objectives.get(objective)
        return Measured(gauges.get((signal, ())), limit / 1e3 if limit is not None else None)

    return ServiceView(
        namespace=meta["namespace"],
        name=meta["name"],
        ready=_shown(_section(status, "summary").get("ready")),
        wanted=_shown(_section(status, "scaling").get("desired", status.get("replicas"))),
        queue_wait=measured("signal_queue_wait_seconds", "queueWaitMilliseconds"),
        batch_time=measured("signal_batch_time_seconds", "batchTimeMilliseconds"),
        ttft_s=gauges.get(("signal_time_to_first_token_seconds", ())),
        itl_s=gauges.get(("signal_inter_token_latency_seconds", ())),
        sequences=_shown(_section(status, "batching").get("sequences")),
        tokens=_shown(_section(status, "batching").get("tokens")),
        breaker=_shown(_section(status, "summary").get("breaker")),
        conditions={row["type"]: row for row in status.get("conditions") or ()},
        status=status,
        gauges=gauges,
        changes=_changes(status),
    )


def _unreadable(why: object) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "Unknown", "reason": "Unreadable"}
    return {"conditions": [{**ready, "message": f"This command cannot read the service: {why}."}]}


def failed_view(namespace: str, name: str, problem: Exception) -> ServiceView:
    """Return the view of a service that this command failed to show."""
    why = f"{type(problem).__name__}: {problem}"
    return view_of(stand_in(why, namespace=namespace, name=name), {})


def views_of(
    resources: Iterable[Mapping[str, Any]],
    gauges: Mapping[ServiceKey, Gauges],
    checked: Callable[[ServiceView], object] = bool,
) -> list[ServiceView]:
    """Return the views of all services, sorted by namespace and name.

    A service for which the view or `checked` raises is shown as unreadable, and hides no other.
    """

    def view(item: Mapping[str, Any]) -> ServiceView:
        namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
        try:
            found = view_of(item, gauges.get((namespace, name), {}))
            checked(found)
        except Exception as problem:  # noqa: BLE001 - no list of types foresees what tenants write
            return failed_view(namespace, name, problem)
        return found

    views = [view(item) for item in resources]
    return sorted(views, key=lambda view: (view.namespace, view.name))


def age_in_words(time: str, now: float) -> str:
    """Return the age of an RFC 3339 time as `12s`, `4m`, `3h`, or `2d`; `-` for an invalid time."""
    then = rfc3339.parse(time)
    if then is None:
        return "-"
    seconds = max(0, int(now - then))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def in_milliseconds(measured: Measured) -> str:
    """Format as `310 / 500 ms`, or as `- / 500 ms` if the value is unknown."""
    value = "-" if measured.value_s is None else f"{measured.value_s * 1e3:.0f}"
    limit = "-" if measured.objective_s is None else f"{measured.objective_s * 1e3:.0f}"
    return f"{value} / {limit} ms"


def latency_in_milliseconds(value_s: float | None) -> str:
    """Format as `33.7 ms`, with at least three digits, or as `-` if it is unknown."""
    if value_s is None:
        return "-"
    value_ms = value_s * 1e3
    decimals = 0 if value_ms >= 100 else 1 if value_ms >= 10 else 2
    return f"{value_ms:.{decimals}f} ms"
