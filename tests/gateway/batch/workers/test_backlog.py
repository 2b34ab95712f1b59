"""What waits for each service, and where lines go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper_contract.sleep import SleepState
from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import Route
from fleetkeeper_gateway.batch.lifecycle.backlog import Destinations
from fleetkeeper_gateway.batch.lifecycle.life import Left
from fleetkeeper_gateway.batch.metrics import Due, required_rate
from fleetkeeper_gateway.batch.model import Validated
from fleetkeeper_gateway.interfaces import Key, KeyRefused, Sleeping
from tests.gateway.batch.workers.lifecycle_world import NOW, batch_record
from tests.gateway.http.world import MemoryServices, service

NAMESPACES = {"key-1": "team", "key-2": "other", "key-3": "x"}


class NamedKeys:
    """Keys by their ID."""

    synced = True

    def named(self, key_id: str, now: float) -> Key:  # noqa: ARG002 - as Keys has it
        if key_id == "bad":
            raise ValueError("a defect")
        if key_id not in NAMESPACES:
            raise KeyRefused("invalid_api_key", "no", key_id)
        return Key(key_id, "k", frozenset({NAMESPACES[key_id]}))


@pytest.fixture
def services() -> MemoryServices:
    found = MemoryServices()
    found.set(service(), service("other", models=("n",)), service(namespace="other"))
    return found


@pytest.fixture
def destinations(services: MemoryServices) -> Iterator[Destinations]:
    keys: Any = NamedKeys()
    yield Destinations(services, keys, lambda: NOW)
    metrics.show_backlog({}, NOW)


def left(lines: int, after_s: float, key_id: str = "key-1", model: str = "m") -> Left:
    record = batch_record(key_id=key_id, expires=int(NOW + after_s))
    return Left(record, Validated(100, model, 50_000, 0), lines)


def series() -> dict[str, float]:
    gauges = metrics.BACKLOG, metrics.REMAINING, metrics.EARLIEST, metrics.RATE
    return {
        f"{metric.name} {'/'.join(sample.labels.values())}": sample.value
        for gauge in gauges
        for metric in gauge.collect()
        for sample in metric.samples
    }


def test_what_is_left_is_shown_by_the_service_that_the_gateway_chooses(
    services: MemoryServices, destinations: Destinations
) -> None:
    defects = metrics.DEFECTS.labels("backlog")._value
    before = defects.get()
    destinations.show(
        [
            left(9, 5, "bad"),  # it hides no other
            left(40, 100),
            left(20, 10),
            left(100, 1000, model="n"),
            left(0, 5),
            left(9, 5, "key-3"),
            left(9, 5, "gone"),
            left(9, 5, model="unknown"),
        ]
    )
    assert defects.get() == before + 1
    deadline, later = int(NOW + 10), int(NOW + 1000)
    assert series() == {
        "fleetkeeper_batch_backlog_tokens team/chat": 30_000,
        "fleetkeeper_batch_backlog_tokens team/other": 50_000,
        "fleetkeeper_batch_remaining_lines team/chat": 60,
        "fleetkeeper_batch_remaining_lines team/other": 100,
        "fleetkeeper_batch_deadline_timestamp_seconds team/chat": deadline,
        "fleetkeeper_batch_deadline_timestamp_seconds team/other": later,
        "fleetkeeper_batch_required_tokens_per_second team/chat": 10_000 / (deadline - NOW),
        "fleetkeeper_batch_required_tokens_per_second team/other": 50_000 / (later - NOW),
    }
    services.synced = False
    destinations.show([left(40, 100)])
    assert series() == {}


def test_a_route_is_the_service_that_the_gateway_chooses_or_the_flow(
    services: MemoryServices, destinations: Destinations
) -> None:
    """Models of two services may have one name; it says nothing about where a line goes."""
    assert destinations.route("key-1", "m") == Route("service team/chat")
    assert destinations.route("key-2", "m") == Route("service other/chat")
    assert destinations.route("key-3", "m") == Route("key-3/m")
    services.synced = False
    assert destinations.route("key-1", "m") == Route("key-1/m")
    keys: Any = NamedKeys()
    assert Destinations(None, keys).route("key-1", "m") == Route("key-1/m")


def test_a_service_is_woken_by_all_lines_if_it_says_so_or_once_one_batch_needs_it(
    services: MemoryServices, destinations: Destinations
) -> None:
    """A process may hold only lines of batches that could wait, also of another key."""
    services.set(
        service(sleep=Sleeping(1, SleepState.ASLEEP, starts=(60, 600))),
        service("other", models=("n",)),
        service("at-once", models=("a",), wakes_for_batch=True),
    )
    hour = {"created": int(NOW - 1799), "expires": int(NOW + 1801)}
    soon = Left(batch_record(**hour), Validated(100, "n", 50_000, 0), 1)
    early = Left(batch_record(**hour), Validated(100, "m", 50_000, 0), 1)

    def wakes() -> list[str | None]:
        return [destinations.route("key-1", model).wake for model in ("m", "n", "a")]

    destinations.show([early, soon])
    assert wakes() == [None, None, "always"]
    assert destinations.route("key-1", "m") == Route("service team/chat", None, 600)
    slow = service(sleep=Sleeping(1, SleepState.ASLEEP, starts=(60, 901)))
    services.set(slow, *list(services.known.values())[1:])
    destinations.show([early, soon])
    assert wakes() == ["deadline", None, "always"]
    due = replace(soon, record=replace(soon.record, created=int(NOW - 1801)))
    destinations.show([due])
    assert wakes() == [None, "deadline", "always"]
    destinations.show([replace(due, lines=0)])
    assert wakes() == [None, None, "always"]
    destinations.show([due])
    destinations.show(())
    assert wakes() == [None, None, "always"], "another process leads"


@pytest.mark.parametrize(
    ("due", "rate"),
    [
        ([], 0.0),
        ([Due(1, 100, 10.0)], 10.0),
        ([Due(1, 300, 20.0), Due(1, 100, 10.0)], 20.0),
        ([Due(1, 10, 20.0), Due(1, 400, 10.0)], 40.0),
        ([Due(1, 100, -50.0)], 100.0),
    ],
)
def test_the_rate_meets_every_deadline(due: list[Due], rate: float) -> None:
    assert required_rate(due, 0.0) == rate
