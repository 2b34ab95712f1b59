"""The pods that are read, and what of an answer is believed: anything else is left out without an error."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api import names
from fleetkeeper.reconcile.manifests import engine_pod
from fleetkeeper.reconcile.manifests.common import CONTROL_PORT
from fleetkeeper_contract.usage_files import parse_line
from fleetkeeper_gateway.usage.app import parse_time
from fleetkeeper_gateway.usage.engines import UnreadableError, parse_page
from fleetkeeper_gateway.usage.lines import read_page
from fleetkeeper_gateway.usage.pages import Cursor
from fleetkeeper_gateway.usage.pods import (
    CONTROL_PORT_NAME,
    SELECTOR,
    SERVICE_LABEL,
    Pods,
    Target,
    parse_pod,
)
from tests.support.gateway.usage_ledgers import NOW, Ledger, an_entry

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
POD: dict[str, Any] = {
    "metadata": {
        "name": "chat-1",
        "namespace": "team",
        "uid": "uid-1",
        "labels": {SERVICE_LABEL: "chat"},
    },
    "spec": {
        "containers": [
            {"name": "other"},
            {
                "name": "engine",
                "ports": [
                    {"name": "http", "containerPort": 8000},
                    {"name": "control", "containerPort": 9090},
                ],
            },
        ]
    },
    "status": {"podIP": "10.0.0.7", "phase": "Running"},
}


class Recorder:
    """Keeps what a sink of pods tells."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.targets: list[Target] = []

    def follow(self, target: Target) -> None:
        self.calls.append(f"follow {target.pod.uid}")
        self.targets.append(target)

    def leave(self, uid: str) -> None:
        self.calls.append(f"leave {uid}")


def changed(*path: str, to: object) -> dict[str, Any]:
    found = copy.deepcopy(POD)
    place: Any = found
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return found


def test_names_are_those_that_the_operator_gives() -> None:
    labels = names.labels("chat", names.Component.ENGINE)
    assert set(SELECTOR.split(",")) <= {f"{name}={value}" for name, value in labels.items()}
    assert labels[SERVICE_LABEL] == "chat"
    assert engine_pod.CONTROL_PORT_NAME == CONTROL_PORT_NAME
    assert CONTROL_PORT == 9090


def test_a_pod_with_an_address_is_read_at_its_control_port() -> None:
    found = parse_pod(POD)
    assert found is not None
    assert (found.url, found.pod.service, found.terminating) == (
        "http://10.0.0.7:9090",
        "chat",
        False,
    )
    v6 = parse_pod(changed("status", "podIP", to="fd00::7"))
    assert v6 is not None
    assert v6.url == "http://[fd00::7]:9090"


@pytest.mark.parametrize(
    "pod",
    [
        changed("status", "podIP", to="api.example.com/x?"),
        changed("status", "podIP", to=None),
        changed("status", to={}),
        changed("status", "phase", to="Failed"),
        changed("status", "phase", to="Succeeded"),
        changed("metadata", "labels", to={}),
        changed("spec", "containers", to=[{"name": "engine"}]),
        {},
    ],
)
def test_a_pod_that_cannot_be_asked_is_left_out(pod: dict[str, Any]) -> None:
    recorder = Recorder()
    pods = Pods(recorder)
    pods.put(("team", "chat-1"), POD)
    pods.put(("team", "chat-1"), pod)
    pods.put(("team", "chat-1"), pod)
    assert recorder.calls == ["follow uid-1", "leave uid-1"]


def test_pods_are_followed_from_their_first_to_their_last_state() -> None:
    recorder = Recorder()
    pods = Pods(recorder)
    pods.put(("team", "chat-1"), POD)
    pods.put(
        ("team", "chat-1"), changed("metadata", "deletionTimestamp", to="2025-11-25T23:00:00Z")
    )
    assert [target.terminating for target in recorder.targets] == [False, True]
    pods.put(("team", "chat-1"), changed("metadata", "uid", to="uid-2"))
    pods.remove(("team", "chat-1"))
    pods.remove(("team", "chat-1"))
    assert recorder.calls == ["follow uid-1"] * 2 + ["leave uid-1", "follow uid-2", "leave uid-2"]


@given(content=st.binary() | JSON.map(lambda found: json.dumps(found).encode()))
def test_any_answer_is_a_page_or_unreadable(content: bytes) -> None:
    with pytest.raises(UnreadableError):
        parse_page(content)


@given(
    changes=st.dictionaries(st.sampled_from([*Ledger("p").document("", 0), "other"]), JSON),
    entry=st.dictionaries(st.sampled_from(["n", *an_entry("a", 1.0, 1)]), JSON),
)
def test_a_page_of_which_anything_was_changed_is_counted_or_unreadable(
    changes: dict[str, Any], entry: dict[str, Any]
) -> None:
    """What is counted gives lines that can be read back."""
    ledger = Ledger("pod-1")
    ledger.add({**an_entry("a", NOW, 5), **entry})
    with suppress(UnreadableError, TypeError):
        # TypeError: the sums of the stand-in's own document.
        page = parse_page(json.dumps({**ledger.document("", 0), **changes}).encode())
        reading = read_page(page, Cursor("pod-1"), ledger.pod, NOW, lambda _: False)
        for line in reading.lines:
            parse_line(json.loads(json.dumps(line)))
        assert reading.cursor.next >= 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 5.0), ("0", 0.0), ("12.5", 12.5), ("1970-01-01T00:01:00Z", 60.0)],
)
def test_times_are_seconds_or_rfc3339(text: str, seconds: float) -> None:
    assert parse_time("since", text, 5.0) == seconds
