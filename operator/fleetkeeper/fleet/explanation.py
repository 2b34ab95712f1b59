"""The state of a service in rows of text: what `fleetkeeper explain` and the console show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fleetkeeper.api.status_enums import ReplicaStage
from fleetkeeper.autoscale.rules.fragmentation import RestartReason
from fleetkeeper.fleet.view import (
    ServiceView,
    age_in_words,
    in_milliseconds,
    latency_in_milliseconds,
)
from fleetkeeper_contract import rfc3339

Row = tuple[str, str]

SHARES = (
    ("KV cache used", "signal_kv_ratio"),
    ("Replicas that report metrics", "signal_coverage_ratio"),
    ("Unused allocator memory (worst replica)", "signal_fragmentation_ratio"),
)
COUNTS = (
    ("Requests per second", "signal_arrivals_per_second"),
    ("Waiting requests", "signal_waiting"),
    ("Running requests", "signal_running"),
    ("Sequences per replica (capacity)", "model_capacity_sequences"),
    ("Pressure (1 = at an objective)", "pressure_ratio"),
)
START_STAGES = ("scheduling", "image")
"""The stages of a start that the operator measures."""
GOOD_IN_SLEEP = frozenset({"Asleep", "NeverStarted", "Waking", "Swapping", "NoMetrics"})
"""Reasons of conditions that are no problem while a service sleeps, wakes or swaps its only replica."""
GOOD_WHEN_FALSE = frozenset({"Degraded", "ScalingLimited", "Progressing", "Reconciling", "Stalled"})


def _decision(view: ServiceView, section: str, what: str) -> Row:
    part = view.status.get(section) or {}
    if not part:
        return what, "no decision yet"
    why = part.get("message") or part.get("reason") or ""
    return what, f"{part.get('reason', '')}: {why}" if why != part.get("reason") else why


def evidence_rows(view: ServiceView) -> Iterator[Row]:
    """Yield the measurements of the last tick: the inputs of decisions, and what users see."""
    yield "Queue wait (now / objective)", in_milliseconds(view.queue_wait)
    yield "Batch time (now / objective)", in_milliseconds(view.batch_time)
    for title, seconds in (("TTFT", view.ttft_s), ("ITL", view.itl_s)):
        if seconds is not None:
            yield f"{title} (mean of streamed answers)", latency_in_milliseconds(seconds)
    for title, name in COUNTS:
        value = view.gauge(name)
        if value is not None:
            yield title, f"{value:.4g}"
    yield from start_rows(view)
    for title, name in SHARES:
        value = view.gauge(name)
        if value is not None:
            yield title, f"{value:.0%}"


def decision_rows(view: ServiceView) -> Iterator[Row]:
    """Yield the current decisions and the reasons for them."""
    if view.is_simulated:
        profile = view.status["engine"].get("profile", "")
        yield "Engine", f"simulated (profile {profile}): no model answers"
    yield _decision(view, "scaling", f"Replicas: {view.ready} ready, {view.wanted} desired")
    yield from sleep_rows(view)
    title = f"Limits: {view.sequences} sequences, {view.tokens} tokens per step"
    yield _decision(view, "batching", title)
    yield from breaker_rows(view)
    yield from restart_rows(view)
    signals = view.conditions.get("MetricsAvailable") or {}
    yield "Metrics", signals.get("message") or "no measurements yet"


BREAKER_OF = {"PrometheusLost": "source", "Overload": "load"}
"""The breaker to which a reason in status.breaker belongs. Other reasons belong to the control breaker."""

BREAKERS = (
    ("control", "Control breaker (protects the fleet)"),
    ("source", "Source breaker (Prometheus)"),
    ("load", "Load breaker (protects from overload)"),
)


def breaker_rows(view: ServiceView) -> Iterator[Row]:
    """Yield the state of each breaker, with the time and the reason for the latest change."""
    breaker = view.status.get("breaker") or {}
    reason = breaker.get("reason", "")
    latest = BREAKER_OF.get(reason, "control") if reason else ""
    for name, title in BREAKERS:
        state = breaker.get(name) or "-"
        if isinstance(state, dict):
            state = ", ".join(f"{tier} {of_tier}" for tier, of_tier in state.items())
        if name == latest:
            since = f" since {breaker['since']}" if "since" in breaker else ""
            state += f"{since}: {reason}: {breaker.get('message', '')}"
        yield title, state


def sleep_rows(view: ServiceView) -> Iterator[Row]:
    """Yield since when the service sleeps, wakes or swaps, or why it never sleeps."""
    sleep = view.sleep
    if sleep.state is not None:
        rank = f", with the rank of tier {sleep.tier.label}" if sleep.tier is not None else ""
        failed = f", after failed starts: {sleep.failures}" if sleep.failures else ""
        title = "Swap" if sleep.is_swapping else "Sleep"
        is_told = sleep.message and not sleep.failures and not sleep.is_waking
        why = f": {sleep.message}" if is_told else ""
        yield (
            title,
            f"{sleep.shown_state} since {rfc3339.format(sleep.since)}{rank}{failed}{why}",
        )
    elif sleep.message:
        yield "Sleep", sleep.message


def restart_rows(view: ServiceView) -> Iterator[Row]:
    """Yield whether fragmented replicas are restarted or why not, if memory.restartFragmented is set."""
    texts = {str(reason): reason.text for reason in RestartReason}
    for name, labels in view.gauges:
        if name == "decision_restart":
            reason = dict(labels).get("reason", "")
            yield "Restart of fragmented replicas", f"{reason}: {texts.get(reason, '')}"


def replica_rows(view: ServiceView, now: float) -> Iterator[Row]:
    """Yield the replicas that are not ready: stage, time in it, node and reason."""
    for state in view.status.get("replicaStates") or ():
        if state.get("stage") == ReplicaStage.READY:
            continue
        text = f"{state.get('stage')} for {age_in_words(state.get('since', ''), now)}"
        node, reason = state.get("node"), state.get("reason")
        text += f" on {node}" if node else ""
        yield str(state.get("name")), f"{text}: {reason}" if reason else text


def start_rows(view: ServiceView) -> Iterator[Row]:
    """Yield how long a start takes: the forecast, and the medians of the stages before the engine."""
    total = view.gauge("cold_start_seconds")
    if total is None:
        return
    stages = ((stage, view.gauge("replica_start_seconds", stage=stage)) for stage in START_STAGES)
    medians = ", ".join(f"{stage} {value:.0f} s" for stage, value in stages if value is not None)
    yield "Start of a replica", f"{total:.0f} s" + (f" ({medians})" if medians else "")


def is_as_wanted(view: ServiceView, condition: Mapping[str, Any]) -> bool:
    """Return True if a condition indicates no problem of the service."""
    if view.sleep.state is not None and condition.get("reason") in GOOD_IN_SLEEP:
        return True
    wanted = "False" if condition.get("type") in GOOD_WHEN_FALSE else "True"
    return condition.get("status") == wanted


def trouble_rows(view: ServiceView) -> Iterator[Row]:
    """Yield the conditions that indicate a problem, with their messages."""
    for kind, condition in view.conditions.items():
        if not is_as_wanted(view, condition):
            title = f"{kind} is {condition.get('status')} ({condition.get('reason')})"
            yield title, condition.get("message", "")


def change_rows(view: ServiceView, now: float) -> Iterator[Row]:
    """Yield the last decisions, newest first."""
    return ((f"{age_in_words(c.time, now)} ago", c.in_words()) for c in view.changes[::-1])


def explained(view: ServiceView, now: float) -> str:
    """Return what `explain` prints as plain text, one row per line."""
    parts = (
        (f"{view.title}: current state", decision_rows(view)),
        ("Measurements", evidence_rows(view)),
        ("Problems", trouble_rows(view)),
        ("Replicas that are not ready", replica_rows(view, now)),
        ("Last decisions, newest first", change_rows(view, now)),
    )
    lines = [
        line for title, rows in parts for line in (title, *(f"  {a}: {b}" for a, b in rows), "")
    ]
    return "\n".join(lines)
