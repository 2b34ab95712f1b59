"""The demo's page tells what happened, and calls no failure by another one's name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper_local.demo.fleet import condition_of, pod_facts, ready_in_its_generation
from fleetkeeper_local.demo.installation import desired_model_claim
from fleetkeeper_local.demo.record import (
    FLEET,
    OURS,
    Frozen,
    Moment,
    failed,
    inside,
    merged,
    moments_of_decisions,
    moments_of_events,
    page,
    seconds_of,
)
from fleetkeeper_local.load.client import Outcome
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Arrival

pytestmark = pytest.mark.exhaustive

START = seconds_of("2026-01-01T00:00:00Z")


def _sample(sent_s: float, ended_s: float, *, status: int = 200, cause: str = "") -> Sample:
    arrival = Arrival(0, sent_s, "x1", "standard", "s", 8, 8)
    first = sent_s + 0.1 if not cause else None
    return Sample(
        arrival,
        Outcome(not cause, cause, status, 1, sent_s, first, ended_s, 8),
        sent_s,
        sent_s,
        ended_s,
    )


def _page(samples: list[Sample], frozen: Frozen | None) -> str:
    moments = [
        Moment(START + 5, OURS, "kill -9 of 2 operator processes"),
        Moment(START + 9, FLEET, "Replicas 1 -> 2: queue wait 1.9 s against 0.5 s"),
    ]
    return page(
        "A run",
        start_s=START,
        moments=moments,
        samples=samples,
        frozen=frozen,
        notes=("Figure: a.png",),
    )


def test_a_clean_run_says_that_nothing_failed() -> None:
    """What was done to the fleet is set apart from what it decided itself."""
    text = _page([_sample(1, 2), _sample(2, 3)], None)
    assert "Failed requests: none." in text
    assert "      5  ** kill -9 of 2 operator processes" in text
    assert "      9     Replicas 1 -> 2: queue wait 1.9 s against 0.5 s" in text
    assert "Figure: a.png" in text


def test_failures_are_told_by_cause_and_by_place() -> None:
    """A request that broke while it was in the frozen engine is no other failure's alibi."""
    caught = _sample(10, 80, status=200, cause="truncated")
    later = _sample(50, 60, status=500, cause="http_500")
    before = _sample(1, 2, status=0, cause="connection")
    text = _page([_sample(1, 2), caught, later, before], Frozen(12.0, 24.0, 78.0))
    assert "Failed requests: 3 of 4; 1 in the frozen engine." in text
    assert "1  truncated (frozen engine)" in text
    assert "1  http_500 (elsewhere)" in text
    assert "1  connection (elsewhere)" in text


def test_a_refusal_is_no_failure() -> None:
    """429 after all tries is the tier's limit at work: counted, and counted apart."""
    refused = _sample(1, 2, status=429, cause="http_429")
    assert failed([refused]) == []
    assert "Failed requests: none." in _page([refused], None)


def test_who_was_inside_is_decided_by_when_it_was_sent_and_when_it_broke() -> None:
    """Ended before, sent after the pod was ejected, or broken off later: not inside."""
    frozen = Frozen(10.0, 20.0, 70.0)
    assert inside([_sample(5, 9), _sample(21, 30), _sample(15, 90)], frozen) == []
    held = [_sample(5, 11), _sample(12, 78), _sample(20, 21)]
    assert inside(held, frozen) == held
    assert inside(held, None) == []
    assert inside([_sample(5, 70, cause="timeout")], frozen) == []


def test_a_request_that_was_told_to_come_back_and_did_is_answered() -> None:
    """Counted as answered, and told apart: that is what Retry-After promises."""
    again = replace(_sample(1, 9), outcome=replace(_sample(1, 9).outcome, attempts=3))
    text = _page([_sample(1, 2), again], None)
    row = next(line.split() for line in text.splitlines() if line.startswith("all "))
    assert row[1:6] == ["2", "2", "1", "0", "0"]
    assert "Failed requests: none." in text


def test_what_is_told_twice_is_shown_once_with_its_reason() -> None:
    """A decision and its event differ in capitals and in how much they say."""
    bare = Moment(START + 90, FLEET, "replicas 1 -> 2: QueueWaitAboveTarget")
    full = Moment(START + 91, FLEET, "Replicas 1 -> 2: queue wait 4.4 s against 0.5 s")
    later = Moment(START + 200, FLEET, "replicas 1 -> 2: QueueWaitAboveTarget")
    assert [m.text for m in merged([bare], [full], [later])] == [full.text, later.text]
    apart = [Moment(START, OURS, "load: 1"), Moment(START, OURS, "load: 2")]
    assert merged(apart) == apart


def test_events_and_decisions_become_one_story() -> None:
    """In order of time, without what was before, and nothing twice."""
    events = [
        {
            "lastTimestamp": "2026-01-01T00:00:09Z",
            "reason": "ScaledUp",
            "message": "Replicas 1 -> 2",
        },
        {
            "lastTimestamp": "2026-01-01T00:00:30Z",
            "reason": "ScaledUp",
            "message": "Replicas 1 -> 2",
        },
        {"lastTimestamp": "2025-12-31T23:59:00Z", "reason": "Old", "message": "before"},
    ]
    decisions = [
        {
            "time": "2026-01-01T00:00:05Z",
            "what": "sequences",
            "from": "11",
            "to": "12",
            "message": "room",
        },
        {
            "time": "2026-01-01T00:00:10Z",
            "what": "replicas",
            "from": "1",
            "to": "2",
            "message": "Replicas 1 -> 2",
        },
        {"time": "2026-01-01T00:00:11Z", "what": "breaker", "from": "", "to": "Tier batch closed"},
        {
            "time": "2026-01-01T00:00:12Z",
            "what": "limits",
            "from": "9/512",
            "to": "9/256",
            "reason": "A",
        },
    ]
    told = merged(moments_of_events(events, START), moments_of_decisions(decisions, START))
    assert [(moment.at_s - START, moment.text) for moment in told] == [
        (5.0, "sequences 11 -> 12: room"),
        (9.0, "Replicas 1 -> 2"),
        (11.0, "Tier batch closed"),
        (12.0, "limits 9/512 -> 9/256: A"),
    ]


def test_a_pod_is_the_same_until_it_is_replaced_or_restarted() -> None:
    """Identity is what "nothing restarted" rests on."""

    def pod(uid: str = "u", restarts: int = 0, started: str = "t0") -> dict[str, object]:
        return {
            "metadata": {"name": "a", "uid": uid},
            "spec": {"containers": [{"image": "i"}]},
            "status": {
                "podIP": "10.0.0.1",
                "containerStatuses": [
                    {
                        "ready": True,
                        "restartCount": restarts,
                        "state": {"running": {"startedAt": started}},
                        "lastState": {"terminated": {"reason": "OOMKilled"}},
                    }
                ],
            },
        }

    facts = pod_facts(pod())
    assert (facts.ready, facts.leaving, facts.ended) == (True, False, "OOMKilled")
    assert pod_facts(pod()).identity == facts.identity
    for other in (pod(uid="v"), pod(restarts=1), pod(started="t1")):
        assert pod_facts(other).identity != facts.identity


def test_a_pod_without_containers_yet_is_just_not_ready() -> None:
    """The moment between scheduling and the kubelet's first word."""
    bare = {
        "metadata": {"name": "a", "uid": "u", "deletionTimestamp": "t"},
        "spec": {"containers": [{"image": "i"}]},
        "status": {},
    }
    facts = pod_facts(bare)
    assert (facts.ready, facts.leaving, facts.restarts, facts.ip) == (False, True, 0, "")


def test_ready_counts_for_the_spec_as_it_is_now_only() -> None:
    """An old generation's Ready says nothing of the new one."""

    def live(generation: int, observed: int, status: str = "True") -> dict[str, object]:
        ready = {"type": "Ready", "status": status, "observedGeneration": observed}
        return {
            "metadata": {"generation": generation},
            "status": {"observedGeneration": observed, "conditions": [ready]},
        }

    assert ready_in_its_generation(live(2, 2))
    assert not ready_in_its_generation(live(2, 1))
    assert not ready_in_its_generation(live(2, 2, "False"))
    assert not ready_in_its_generation({"metadata": {"generation": 1}})
    assert condition_of({"metadata": {}}, "Ready") == {}


def test_the_models_claim_is_bound_to_one_namespace_and_one_node(tmp_path: object) -> None:
    """Read-only, without a storage class: nothing can be provisioned in its place."""
    volume, claim = desired_model_claim(tmp_path, "node1", "team-a")  # type: ignore[arg-type]
    assert volume["spec"]["claimRef"] == {"name": "models", "namespace": "team-a"}
    assert volume["spec"]["local"] == {"path": str(tmp_path)}
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == ["ReadOnlyMany"]
