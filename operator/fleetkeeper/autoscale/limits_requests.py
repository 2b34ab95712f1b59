"""The PUT /v1/limits requests that are due: changed values, leases at half-life, retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from fleetkeeper.autoscale.constants import ADMISSION_LEASE_RATIO, LEASE_S, PUT_RETRY_S
from fleetkeeper.autoscale.types import Admission, Limits, LimitsRequest, PodView, PutOutcome


@dataclass(frozen=True, slots=True)
class PodPut:
    """The last limits request sent to one pod."""

    limits: Limits
    admission: Admission
    generation: int
    sent: float
    changed: float
    """Time at which its values last changed (not renewals)."""
    confirmed: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class LimitsRequestsMemory:
    """The last requests by pod name, and the newest generation of this service."""

    puts: Mapping[str, PodPut] = field(default_factory=lambda: MappingProxyType({}))
    generation: int = 0
    has_failed: bool = False
    """True if at least half of the last tick's PUTs failed. One failed pod is not a failure of the
    control loop."""


def next_generation(generation: int, now: float) -> int:
    """Return a generation larger than any sent before, also by a previous process.

    Generations are at least the seconds since the epoch, so they survive a restart without being stored.
    A 409 response contains a newer one, from which the next generation continues.
    """
    return max(generation + 1, int(now))


def after_outcomes(
    memory: LimitsRequestsMemory, outcomes: Sequence[PutOutcome]
) -> LimitsRequestsMemory:
    """Return the memory with the results of the last tick's PUTs."""
    if not outcomes:
        return replace(memory, has_failed=False) if memory.has_failed else memory
    puts = dict(memory.puts)
    newest = memory.generation
    failed = 0
    for outcome in outcomes:
        newest = max(newest, outcome.newest_generation)
        failed += not outcome.succeeded
        put = puts.get(outcome.pod)
        if put is not None and put.generation == outcome.generation:
            puts[outcome.pod] = replace(
                put, confirmed=outcome.succeeded, failed=not outcome.succeeded
            )
    return LimitsRequestsMemory(puts, newest, failed > 0 and 2 * failed >= len(outcomes))


def _is_due(
    put: PodPut | None, limits: Limits, admission: Admission, newest: int, now: float
) -> bool:
    if put is None or put.limits != limits or put.admission != admission:
        return True
    if put.failed:
        return put.generation < newest or now - put.sent >= PUT_RETRY_S
    return now - put.sent >= ADMISSION_LEASE_RATIO * LEASE_S


def due_requests(
    memory: LimitsRequestsMemory,
    pods: Sequence[PodView],
    wanted: Mapping[str, Limits],
    admission: Admission,
    now: float,
) -> tuple[tuple[LimitsRequest, ...], LimitsRequestsMemory]:
    """Return the PUTs of this tick and the new memory. All changed values share one new generation."""
    puts: dict[str, PodPut] = {}
    requests: list[LimitsRequest] = []
    generation = memory.generation
    fresh = 0
    for pod in pods:
        limits = wanted.get(pod.name)
        if limits is None:
            continue
        put = memory.puts.get(pod.name)
        if put is not None and not _is_due(put, limits, admission, generation, now):
            puts[pod.name] = put
            continue
        same = put is not None and put.limits == limits and put.admission == admission
        if put is not None and same and not (put.failed and put.generation < memory.generation):
            put = replace(put, sent=now, failed=False)
        else:
            fresh = fresh or next_generation(generation, now)
            changed = put.changed if put is not None and same else now
            put = PodPut(limits, admission, fresh, now, changed)
        puts[pod.name] = put
        requests.append(
            LimitsRequest(pod.name, pod.uid, pod.ip, limits, admission, LEASE_S, put.generation)
        )
    if not requests and puts == memory.puts:
        return (), memory
    return tuple(requests), LimitsRequestsMemory(puts, max(generation, fresh))


def late_s(
    memory: LimitsRequestsMemory,
    applied: Sequence[tuple[str, float]],
    busy: Sequence[str],
    now: float,
) -> float:
    """Return for how long at least half of the busy pods have not applied their limits, in seconds; else 0.

    An idle scheduler reads no limits and is not late.
    """
    seen = dict(applied)
    waits = [
        now - put.changed if seen.get(pod, 0.0) < put.generation else 0.0
        for pod in busy
        if (put := memory.puts.get(pod)) is not None
    ]
    late = sorted((wait for wait in waits if wait > 0.0), reverse=True)
    if not waits or 2 * len(late) < len(waits):
        return 0.0
    return late[(len(waits) - 1) // 2]
