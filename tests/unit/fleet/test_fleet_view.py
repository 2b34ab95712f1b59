"""`fleetkeeper top` and `explain` show what the status and the control loop's gauges contain."""

from __future__ import annotations

import io
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from fleetkeeper.autoscale.rules.fragmentation import RestartReason
from fleetkeeper.commands.fleet.top import fleet_table
from fleetkeeper.fleet.explanation import (
    BREAKERS,
    SHARES,
    decision_rows,
    evidence_rows,
    replica_rows,
    trouble_rows,
)
from fleetkeeper.fleet.view import (
    Measured,
    age_in_words,
    in_milliseconds,
    latency_in_milliseconds,
    parse_gauges,
    view_of,
    views_of,
)
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.queue import Key
from fleetkeeper_contract import rfc3339

NOW = 1_790_000_000.0


def service(**status: Any) -> dict[str, Any]:
    """A service with objectives and whatever status a test needs."""
    return {
        "metadata": {"namespace": "team-a", "name": "chat"},
        "spec": {"objectives": {"queueWaitMilliseconds": 500, "batchTimeMilliseconds": 50}},
        "status": status,
    }


def exposition(*gauges: tuple[str, tuple[tuple[str, str], ...], float]) -> str:
    """What an operator with these gauges for team-a/chat answers to a scrape."""
    registry = CollectorRegistry()
    ControlMetrics(registry).show(Key("team-a", "chat"), gauges)
    return generate_latest(registry).decode()


def printed(table: object) -> str:
    """A renderable as plain text."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_gauges_go_the_whole_way_from_the_operator_to_the_table() -> None:
    """What ControlMetrics exports is what `top` shows, in milliseconds against the objective."""
    text = exposition(
        ("signal_queue_wait_seconds", (), 0.81),
        ("signal_batch_time_seconds", (), 0.0314),
        ("signal_time_to_first_token_seconds", (), 1.2345),
        ("signal_inter_token_latency_seconds", (), 0.0337),
    )
    status = {
        "summary": {"ready": "2/2", "breaker": "batch open"},
        "scaling": {"desired": 3},
        "batching": {"sequences": 96, "tokens": 4096},
    }
    views = views_of([service(**status)], parse_gauges(text))
    shown = printed(fleet_table(views, NOW))
    for part in ("team-a/chat", "2/3", "810 / 500 ms", "31 / 50 ms", "96", "4096", "batch open"):
        assert part in shown
    for part in ("TTFT", "1234 ms", "ITL", "33.7 ms"):
        assert part in shown
    assert views[0].queue_wait.is_broken
    assert not views[0].batch_time.is_broken


def test_labels_of_a_gauge_are_kept_apart() -> None:
    """Recommended and live replicas are two figures of one name."""
    text = exposition(
        ("decision_replicas", (("kind", "recommended"),), 4.0),
        ("decision_replicas", (("kind", "live"),), 2.0),
    )
    gauges = parse_gauges(text)["team-a", "chat"]
    view = view_of(service(), gauges)
    assert view.gauge("decision_replicas", kind="recommended") == 4.0
    assert view.gauge("decision_replicas", kind="live") == 2.0
    assert view.gauge("decision_replicas") is None


def test_a_service_that_is_gone_leaves_no_series() -> None:
    """Dashboards do not show ghosts."""
    registry = CollectorRegistry()
    metrics = ControlMetrics(registry)
    metrics.show(Key("a", "b"), [("signal_waiting", (), 1.0)])
    metrics.forget(Key("a", "b"))
    assert "signal_waiting" not in generate_latest(registry).decode()


def test_a_new_service_without_status_or_measurements_is_shown_with_dashes() -> None:
    """Nothing known is a dash, not a zero and not a crash."""
    view = view_of(service(), {})
    assert view.ready == "-"
    assert in_milliseconds(view.queue_wait) == "- / 500 ms"
    assert "team-a/chat" in printed(fleet_table([view], NOW))
    ((title, why),) = (row for row in decision_rows(view) if row[0].startswith("Replicas"))
    assert title.count("-") == 2
    assert "no decision" in why


def test_explain_shows_reasons_with_figures() -> None:
    """The reason, its message, and the figures behind them."""
    status = {
        "summary": {"ready": "2/2"},
        "scaling": {
            "desired": 3,
            "reason": "QueueWaitAboveTarget",
            "message": "Queue wait p95 1.9 s against 0.5 s, batch at its limit",
        },
        "breaker": {
            "control": "Closed",
            "source": "Closed",
            "load": {"standard": "Closed", "batch": "Open"},
            "reason": "Overload",
            "message": "Pressure 1.20 above 0.9",
            "since": "2026-09-21T14:13:20Z",
        },
        "conditions": [
            {
                "type": "MetricsAvailable",
                "status": "True",
                "reason": "FreshMetrics",
                "message": "Signals are fresh, from Prometheus.",
            }
        ],
    }
    text = exposition(("signal_kv_ratio", (), 0.42), ("pressure_ratio", (), 3.8))
    view = view_of(service(**status), parse_gauges(text)["team-a", "chat"])
    decisions = dict(decision_rows(view))
    (replicas,) = (title for title in decisions if title.startswith("Replicas"))
    assert "2/2" in replicas
    assert "3" in replicas
    assert (
        decisions[replicas]
        == "QueueWaitAboveTarget: Queue wait p95 1.9 s against 0.5 s, batch at its limit"
    )
    breakers = dict(BREAKERS)
    assert decisions[breakers["control"]] == "Closed"
    assert decisions[breakers["source"]] == "Closed"
    assert decisions[breakers["load"]] == (
        "standard Closed, batch Open since 2026-09-21T14:13:20Z: Overload: Pressure 1.20 above 0.9"
    )
    assert decisions["Metrics"] == "Signals are fresh, from Prometheus."
    evidence = dict(evidence_rows(view))
    assert evidence["KV cache used"] == "42%"
    assert evidence["Pressure (1 = at an objective)"] == "3.8"


def test_explain_shows_what_users_see_only_if_it_is_measured() -> None:
    """Means of streamed answers; without any, or with engines of an older image, there is no row."""
    measured = exposition(
        ("signal_time_to_first_token_seconds", (), 0.81),
        ("signal_inter_token_latency_seconds", (), 0.0314),
    )
    rows = dict(evidence_rows(view_of(service(), parse_gauges(measured)["team-a", "chat"])))
    assert rows["TTFT (mean of streamed answers)"] == "810 ms"
    assert rows["ITL (mean of streamed answers)"] == "31.4 ms"
    none = view_of(
        service(), parse_gauges(exposition(("signal_waiting", (), 1.0)))["team-a", "chat"]
    )
    assert not [title for title, _ in evidence_rows(none) if "streamed" in title]
    header, row = printed(fleet_table([none], NOW)).splitlines()[:2]
    assert row[header.index("TTFT") :].startswith("- ")
    assert row[header.index("ITL") :].startswith("- ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00123, "1.23 ms"), (0.0337, "33.7 ms"), (0.8, "800 ms"), (1.2345, "1234 ms"), (None, "-")],
)
def test_a_latency_has_three_digits_in_milliseconds(seconds: float | None, text: str) -> None:
    assert latency_in_milliseconds(seconds) == text


def test_explain_says_why_no_fragmented_replica_is_restarted() -> None:
    """Only where the spec asks for restarts; the figure is there anyway."""
    figure = ("signal_fragmentation_ratio", (), 0.42)
    text = exposition(figure, ("decision_restart", (("reason", "OnlyReplica"),), 0.0))
    view = view_of(service(), parse_gauges(text)["team-a", "chat"])
    titles = {name: title for title, name in SHARES}
    assert dict(evidence_rows(view))[titles["signal_fragmentation_ratio"]] == "42%"
    assert dict(decision_rows(view))["Restart of fragmented replicas"] == (
        f"OnlyReplica: {RestartReason.ONLY_REPLICA.text}"
    )
    view = view_of(service(), parse_gauges(exposition(figure))["team-a", "chat"])
    assert "Restart of fragmented replicas" not in dict(decision_rows(view))


@pytest.mark.parametrize(
    ("reason", "breaker"),
    [("PrometheusLost", "source"), ("Overload", "load"), ("Oscillating", "control")],
)
def test_explain_names_the_breaker_that_a_reason_is_of(reason: str, breaker: str) -> None:
    """The status has one reason; it is shown at its own breaker and at no other."""
    states = {"control": "Open", "source": "Open", "load": {"batch": "Open"}}
    view = view_of(service(breaker={**states, "reason": reason, "message": "Why"}), {})
    titles = dict(BREAKERS)
    found = {row: text for row, text in decision_rows(view) if row in titles.values()}
    assert len(found) == 3
    assert [row for row, text in found.items() if "Why" in text] == [titles[breaker]]


def test_explain_lists_only_conditions_that_are_not_as_they_should_be() -> None:
    """Degraded=False is fine; Ready=False is not."""
    conditions = [
        {"type": "Ready", "status": "False", "reason": "ImagePull", "message": "Check the image."},
        {"type": "Degraded", "status": "False", "reason": "AsExpected", "message": ""},
        {"type": "Available", "status": "True", "reason": "Answers", "message": ""},
    ]
    rows = list(trouble_rows(view_of(service(conditions=conditions), {})))
    assert rows == [("Ready is False (ImagePull)", "Check the image.")]


def asleep(**sleep: Any) -> dict[str, Any]:
    """A service without replicas because no request came."""
    away = {"status": "False", "reason": "Asleep", "message": "No request came."}
    unknown = {"status": "False", "reason": "NoMetrics", "message": "No replica is ready."}
    return service(
        summary={"ready": "0/0"},
        scaling={"desired": 0, "reason": "Asleep", "message": "the service is asleep"},
        sleep={"number": 7, "state": "Asleep", "since": "2026-09-21T14:13:20Z", **sleep},
        conditions=[
            {**away, "type": "Available"},
            {**away, "type": "Ready", "status": "True"},
            {**unknown, "type": "MetricsAvailable"},
        ],
    )


def test_a_service_that_sleeps_is_shown_as_such_and_is_no_problem() -> None:
    view = view_of(asleep(), {})
    assert list(trouble_rows(view)) == []
    assert dict(decision_rows(view))["Sleep"] == "Asleep since 2026-09-21T14:13:20Z"
    assert "0/0 Asleep" in printed(fleet_table([view], NOW))


def test_explain_says_for_which_service_another_one_sleeps() -> None:
    view = view_of(asleep(message="it sleeps for a/b"), {})
    assert dict(decision_rows(view))["Sleep"].endswith(": it sleeps for a/b")
    waking = view_of(asleep(state="Waking", message="it sleeps for a/b"), {})
    assert "a/b" not in dict(decision_rows(waking))["Sleep"]


def test_a_service_that_never_started_says_why_and_is_no_problem() -> None:
    status = asleep(number=1, neverStarted=True, message="no room")["status"]
    for row in status["conditions"][:2]:
        row["reason"] = "NeverStarted"
    view = view_of(service(**status), {})
    assert list(trouble_rows(view)) == []
    expected = "NeverStarted since 2026-09-21T14:13:20Z: no room"
    assert dict(decision_rows(view))["Sleep"] == expected
    assert "0/0 NeverStarted" in printed(fleet_table([view], NOW))
    status["sleep"].update(state="Waking", tier="batch")
    row = dict(decision_rows(view_of(service(**status), {})))["Sleep"]
    assert row == "Waking since 2026-09-21T14:13:20Z, with the rank of tier batch"


def test_explain_says_for_which_tier_a_service_wakes_and_which_try_it_is() -> None:
    view = view_of(asleep(state="Waking", tier="realtime", failures=2), {})
    assert dict(decision_rows(view))["Sleep"] == (
        "Waking since 2026-09-21T14:13:20Z, with the rank of tier realtime, after failed starts: 2"
    )


def test_a_service_that_swaps_its_only_replica_is_shown_as_such_and_is_no_problem() -> None:
    sleep = {"number": 1, "state": "Swapping", "since": "2026-09-21T14:13:20Z"}
    away = {"type": "Available", "status": "False", "reason": "Swapping", "message": "m"}
    ready = {"type": "Ready", "status": "True", "reason": "Swapping", "message": "m"}
    view = view_of(
        service(summary={"ready": "0/1"}, replicas=1, sleep=sleep, conditions=[away, ready]), {}
    )
    assert dict(decision_rows(view))["Swap"] == "Swapping since 2026-09-21T14:13:20Z"
    assert list(trouble_rows(view)) == []
    assert "0/1 Swapping" in printed(fleet_table([view], NOW))


def test_explain_says_why_a_service_never_sleeps() -> None:
    view = view_of(service(sleep={"number": 0, "message": "stays awake: no gateway"}), {})
    assert dict(decision_rows(view))["Sleep"] == "stays awake: no gateway"
    assert "Sleep" not in dict(decision_rows(view_of(service(sleep={"number": 7}), {})))


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0s"), (59, "59s"), (60, "1m"), (3600, "1h"), (200_000, "2d")]
)
def test_ages_have_one_unit(seconds: int, words: str) -> None:
    """The largest unit that fits."""
    assert age_in_words("2026-09-21T14:13:20Z", NOW + seconds) == words


def test_a_time_that_is_none_has_no_age() -> None:
    """Malformed status costs a dash."""
    assert age_in_words("", NOW) == "-"


def test_an_unknown_figure_breaks_no_objective() -> None:
    """Unknown is not bad."""
    assert not Measured(None, 0.5).is_broken
    assert not Measured(1.0, None).is_broken


def test_explain_shows_replicas_that_are_not_ready_and_how_long_a_start_takes() -> None:
    """The stage and the time in it; the reason if it makes no progress."""
    states = [
        {"name": "chat-a", "stage": "Image", "reason": "ImagePull", "node": "n1",
         "since": rfc3339.format(NOW - 240)},
        {"name": "chat-b", "stage": "Weights", "since": rfc3339.format(NOW - 12)},
        {"name": "chat-c", "stage": "Ready", "since": rfc3339.format(NOW - 900)},
    ]  # fmt: skip
    measured = exposition(
        ("cold_start_seconds", (), 93.4),
        ("replica_start_seconds", (("stage", "scheduling"),), 1.2),
        ("replica_start_seconds", (("stage", "image"),), 14.0),
    )
    view = view_of(service(replicaStates=states), parse_gauges(measured)["team-a", "chat"])
    assert dict(replica_rows(view, NOW)) == {
        "chat-a": "Image for 4m on n1: ImagePull",
        "chat-b": "Weights for 12s",
    }
    start = dict(evidence_rows(view))["Start of a replica"]
    assert start == "93 s (scheduling 1 s, image 14 s)"
