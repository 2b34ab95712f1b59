"""Services from InferenceServices: names, address, state, and whatever a newer CRD may hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.names import address_name, service_url
from fleetkeeper.reconcile.manifests.address import desired_address
from fleetkeeper_contract.sleep import KEPT_STARTS, SleepState
from fleetkeeper_gateway.interfaces import Service, Sleeping
from fleetkeeper_gateway.services.index import ServiceIndex
from fleetkeeper_gateway.services.parse import SERVICE_PORT, parse_service
from fleetkeeper_gateway.services.settings import ServicesSettings
from tests.support.reconcile.golden_services import GoldenCase

PLACE = ("team-a", "chat")


def read(
    spec: object = None,
    conditions: dict[str, str] | None = None,
    url: str | None = "http://chat.team-a.svc:80/v1",
    sleep: object = None,
) -> Service:
    status = {
        "url": url,
        "sleep": sleep,
        "conditions": [
            {"type": kind, "status": value} for kind, value in (conditions or {}).items()
        ],
    }
    metadata = {"uid": "u-1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return parse_service(PLACE, {"metadata": metadata, "spec": spec, "status": status})


def test_the_name_of_the_service_is_its_model_by_default() -> None:
    assert read({"model": {}}).models == ("chat",)


def test_the_served_name_and_the_adapters_are_its_models() -> None:
    adapters = [{"name": "legal"}, {"name": "sql"}, {"name": "legal"}]
    spec = {"model": {"servedName": "org/llama:8b", "adapters": adapters}}
    assert read(spec).models == ("org/llama:8b", "legal", "sql")


def test_its_address_is_the_one_that_the_operator_creates() -> None:
    service = GoldenCase({"model": {"source": "pvc://models/a"}}).service()
    manifest = desired_address(service)
    status = {"url": service_url(service.name, service.namespace)}
    found = parse_service((service.namespace, service.name), {"status": status})
    assert manifest["metadata"]["name"] == address_name(service.name)
    assert [port["port"] for port in manifest["spec"]["ports"]] == [SERVICE_PORT]
    assert service_url(service.name, service.namespace) == f"{found.url}/v1"


@pytest.mark.parametrize(
    ("access", "demanded"), [(None, False), ("Open", False), ("Gateway", True), ("New", False)]
)
def test_a_grant_is_demanded_where_access_is_gateway(access: str | None, demanded: bool) -> None:
    assert read({"access": access}).demands_grant is demanded


@pytest.mark.parametrize(
    ("spec", "conditions", "state", "ready"),
    [
        ({}, {}, "Unknown", False),
        ({}, {"Available": "Unknown"}, "Unknown", False),
        ({}, {"Available": "True"}, "Ready", True),
        ({}, {"Available": "True", "Ready": "False", "Progressing": "True"}, "Ready", True),
        ({}, {"Available": "True", "Degraded": "True"}, "Degraded", True),
        ({}, {"Available": "False", "Progressing": "True"}, "Starting", False),
        ({}, {"Available": "False", "Progressing": "False"}, "Unavailable", False),
        ({"suspend": True}, {"Available": "False"}, "Suspended", False),
        ({"replicas": 0}, {"Available": "False"}, "Suspended", False),
    ],
)
def test_its_state_comes_from_the_status(
    spec: dict[str, Any], conditions: dict[str, str], state: str, ready: bool
) -> None:
    found = read(spec, conditions)
    assert (found.state, found.ready) == (state, ready)
    assert (found.uid, found.created) == ("u-1", 1767225600)


@pytest.mark.parametrize("url", [None, ""])
def test_nothing_is_sent_to_a_service_whose_address_is_not_its_own(url: str | None) -> None:
    """The operator writes the address once it owns the Kubernetes Service of that name."""
    found = read({}, {"Available": "True"}, url=url)
    assert (found.url, found.state, found.ready) == ("", "Unavailable", False)
    assert read({"suspend": True}, {}, url=url).state == "Suspended"
    assert parse_service(PLACE, {}).url == ""


@pytest.mark.parametrize(
    ("state", "shown", "ready"),
    [
        ("Asleep", "Asleep", False),
        ("Waking", "Waking", False),
        ("Swapping", "Swapping", True),
        ("GoingToSleep", "Ready", True),
    ],
)
def test_its_sleep_comes_from_the_status(state: str, shown: str, ready: bool) -> None:
    """The pods of a service that goes to sleep still run."""
    status = {"number": 7, "state": state, "failures": 1, "startSeconds": [20, 40]}
    found = read({}, {"Available": str(ready)}, sleep=status)
    assert found.sleep == Sleeping(7, SleepState(state), failures=1, starts=(20, 40))
    assert (found.state, found.ready) == (shown, ready)


@pytest.mark.parametrize(
    "sleep",
    [
        None,
        [],
        {"number": 7},
        {"number": 7, "state": None},
        {"number": 7, "state": "Dozing"},
        {"number": 7, "state": {}},
        {"number": 0, "state": "Asleep"},
        {"number": True, "state": "Asleep"},
        {"number": "7", "state": "Asleep"},
        {"number": 10**9 + 1, "state": "Asleep"},
    ],
)
def test_a_sleep_that_cannot_be_read_is_none(sleep: object) -> None:
    assert read({}, {"Available": "True"}, sleep=sleep).sleep is None


def test_only_the_last_starts_are_kept() -> None:
    starts = [*range(1, 30)]
    found = read({}, sleep={"number": 1, "state": "Asleep", "startSeconds": starts}).sleep
    assert found is not None
    assert found.starts == (*range(30 - KEPT_STARTS, 30),)


@pytest.mark.parametrize("spec", [{"suspend": True}, {"replicas": 0}])
def test_no_request_wakes_a_suspended_service(spec: dict[str, Any]) -> None:
    found = read(spec, {"Available": "False"}, sleep={"number": 7, "state": "Asleep"})
    assert (found.state, found.sleep) == ("Suspended", None)


@pytest.mark.parametrize(
    ("sleep", "wakes"),
    [
        (None, False),
        ({}, False),
        ({"wakeForBatch": "Deadline"}, False),
        ({"wakeForBatch": "Always"}, True),
        ({"wakeForBatch": "New"}, False),
    ],
)
def test_lines_of_batches_wake_it_at_once_only_if_it_says_so(sleep: object, wakes: bool) -> None:
    assert read({"scaling": {"sleep": sleep}}).wakes_for_batch is wakes
    assert not read({"scaling": None}).wakes_for_batch


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "spec", "status", "model", "adapters", "name", "conditions", "type"]
            ),
            inner,
            max_size=4,
        )
    ),
)


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), JSON))
def test_any_object_is_a_service(found: dict[str, Any]) -> None:
    service = parse_service(PLACE, found)
    assert service.path == "team-a/chat"
    assert service.models


CHANGES = st.lists(
    st.tuples(st.sampled_from("abc"), st.none() | st.lists(st.sampled_from("xyz"), max_size=2)),
    max_size=20,
)


@given(CHANGES)
def test_the_index_has_each_service_under_its_models(
    changes: list[tuple[str, list[str] | None]],
) -> None:
    index, model = ServiceIndex(), dict[str, set[str]]()
    for name, adapters in changes:
        if adapters is None:
            index.remove(("n", name))
            model.pop(name, None)
        else:
            spec = {"model": {"adapters": [{"name": one} for one in adapters]}}
            index.put(("n", name), {"spec": spec})
            model[name] = {name, *adapters}
        assert {one.name for one in index.all()} == model.keys()
        for wanted in "abcxyz":
            names = [one.name for one in index.serving(wanted)]
            assert sorted(names) == sorted(one for one in model if wanted in model[one])
        for name_ in "abc":
            assert (index.named("n", name_) is not None) == (name_ in model)


def test_namespaces_are_a_list_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETKEEPER_GATEWAY_NAMESPACES", "team-a, team-b,")
    monkeypatch.setenv("FLEETKEEPER_GATEWAY_KUBECONFIG", "")
    settings = ServicesSettings()
    assert (settings.namespaces, settings.kubeconfig) == (("team-a", "team-b"), None)
    monkeypatch.setenv("FLEETKEEPER_GATEWAY_NAMESPACES", "")
    assert ServicesSettings().namespaces == ()
