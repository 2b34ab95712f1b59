"""The gauges of a service's spec and status; hostile ones make no series."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.conditions import ConditionType, Reason, Status
from fleetkeeper.reconcile.status.gauges import MAIN, gauges_of_service

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _status(kind: Any, status: Any, reason: Any) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": status, "reason": reason}]}


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("kind", MAIN)
def test_one_of_three_statuses_is_set(kind: ConditionType, status: Status) -> None:
    found = gauges_of_service({}, _status(str(kind), str(status), str(Reason.STARTING)), 0)
    states = {labels[1][1]: value for name, labels, value in found if name == "service_condition"}
    assert states == {value.lower(): float(value is status) for value in Status}
    reasons = [labels for name, labels, _ in found if name == "service_condition_reason"]
    assert reasons == [(("type", str(kind)), ("reason", "Starting"))]


def test_bounds_and_accelerators() -> None:
    found = gauges_of_service({"scaling": {"minReplicas": 0, "maxReplicas": 8}}, {}, 6)
    assert found == (
        ("service_min_replicas", (), 0.0),
        ("service_max_replicas", (), 8.0),
        ("service_accelerators", (), 6.0),
    )


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({}, []),
        ({"sleep": {"number": 3}}, [0.0]),
        ({"sleep": {"number": 3, "state": "Asleep", "failures": 2}}, [2.0]),
        ({"sleep": "x"}, [0.0]),
    ],
)
def test_failed_wakes_of_a_service_that_slept(status: dict[str, Any], shown: list[float]) -> None:
    found = gauges_of_service({}, status, 0)
    assert [value for name, _, value in found if name == "service_failed_wakes"] == shown


@given(st.dictionaries(st.sampled_from(["scaling", "x"]), JSON), JSON, JSON, JSON)
def test_an_invented_status_makes_no_series_of_its_own(
    spec: dict[str, Any], kind: object, status: object, reason: object
) -> None:
    """The number of series has a bound, whoever writes the status."""
    for each in MAIN:
        found = gauges_of_service(spec, _status(str(each), status, reason), 0)
        for name, labels, _ in found:
            if name == "service_condition_reason":
                assert labels[1][1] in {*map(str, Reason)}
        assert len(found) <= 7
    assert len(gauges_of_service(spec, _status(kind, status, reason), 0)) <= 7
