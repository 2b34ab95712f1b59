"""A fleet for the console's tests: eight services in different states, with figures that move.

The figures come from formulas, not from a measurement. The picture in docs/console.md shows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fleetkeeper.console.samples import Samples
from fleetkeeper.fleet.source import Fleet
from fleetkeeper.fleet.view import ServiceKey
from fleetkeeper_contract import rfc3339

Object = dict[str, Any]

INTERVAL_S = 5.0
HOSTILE_MESSAGE = "</script><img src=x onerror=document.title='broken'> \u2028 {{ 7*7 }}"


@dataclass(frozen=True)
class Recorded:
    """A source that answers with the fleet, or raises the problem that it was given."""

    now: float
    problem: Exception | None = None

    def read_fleet(self, namespace: str | None) -> Fleet:
        """Return the services of a namespace."""
        if self.problem is not None:
            raise self.problem
        return fleet_at(self.now, self.now, namespace)


def samples_until(now: float, count: int = 240) -> Samples:
    """Samples of the fleet, as many as wanted, the last one at this time."""
    samples = Samples()
    for index in range(count):
        samples.add(
            fleet_at(now - (count - 1 - index) * INTERVAL_S, now),
            now - (count - 1 - index) * INTERVAL_S,
        )
    return samples


def fleet_at(time: float, now: float, namespace: str | None = None) -> Fleet:
    """The fleet at a time; `now` is when the recording ends."""
    services = [
        item for item in _services(time, now) if namespace in (None, item["metadata"]["namespace"])
    ]
    gauges = {
        (item["metadata"]["namespace"], item["metadata"]["name"]): item.pop("gauges")
        for item in services
    }
    return Fleet(services, {key: found for key, found in gauges.items() if found})


def service(
    name: str, status: Object, gauges: Object, *, namespace: str = "team-a", top: int = 8
) -> Object:
    """A service as the API server returns it, with its gauges."""
    return {
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "objectives": {"queueWaitMilliseconds": 500, "batchTimeMilliseconds": 50},
            "scaling": {"minReplicas": 1, "maxReplicas": top},
        },
        "status": status,
        "gauges": {(key, ()): value for key, value in gauges.items()},
    }


def status_of(ready: int, wanted: int, limits: tuple[int, int], **more: Any) -> Object:
    """A status with the sections that the console shows."""
    return {
        "readyReplicas": ready,
        "summary": {"ready": f"{ready}/{wanted}", "breaker": "closed"},
        "scaling": {"desired": wanted, "reason": "WithinObjectives", "message": "Queue wait and batch time are within their objectives."},
        "batching": {"sequences": limits[0], "tokens": limits[1], "reason": "Unchanged", "message": "The limits fit the load."},
        "breaker": {"control": "Closed", "source": "Closed", "load": dict.fromkeys(("realtime", "standard", "batch"), "Closed")},
        "memory": {"capPercent": 80, "peakPercent": 71},
        **more,
    }  # fmt: skip


def condition(kind: str, status: str, reason: str, message: str, since: float) -> Object:
    """A condition of Kubernetes."""
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": rfc3339.format(since)}  # fmt: skip


def healthy(since: float, text: str = "All replicas are ready.") -> list[Object]:
    """The conditions of a service without problems."""
    return [
        condition("Ready", "True", "AllReplicasReady", text, since),
        condition("Available", "True", "AllReplicasReady", "The service accepts requests.", since),
        condition("Degraded", "False", "AsExpected", "", since),
        condition("MetricsAvailable", "True", "FreshMetrics", "Signals are fresh, from Prometheus.", since),
        condition("MemoryWithinCap", "True", "WithinCap", "Highest peak: 71% of 80%.", since),
        condition("ScalingLimited", "False", "WithinBounds", "", since),
    ]  # fmt: skip


def _figures(wait: float, batch: float, **more: float) -> Object:
    return {"signal_queue_wait_seconds": wait, "signal_batch_time_seconds": batch, **more}


def _services(time: float, now: float) -> list[Object]:
    long_ago = now - 7200
    wave = math.sin(time / 97) * 0.5 + math.sin(time / 23) * 0.2
    return [
        _chat(time, now),
        service("embed", status_of(2, 2, (96, 4096), conditions=healthy(long_ago)), _figures(0.08 + 0.03 * wave, 0.021 + 0.002 * wave)),
        service("summarize", status_of(1, 1, (32, 2048), conditions=healthy(long_ago)), _figures(0.21 + 0.1 * wave, 0.038 + 0.004 * wave), top=4),
        _starting(now),
        _limited(time, now, wave),
        service("translate", status_of(3, 3, (64, 4096), conditions=healthy(long_ago)), _figures(0.15 + 0.07 * wave, 0.033 + 0.003 * wave), namespace="team-b"),
        _lost(now),
        service("new", {}, {}, namespace="team-c"),
    ]  # fmt: skip


CHAT_CHANGES = (
    (900, "replicas", "2", "3", "QueueWaitAboveTarget"),
    (760, "limits", "64 sequences", "96 sequences", "QueueWaitAboveTarget"),
    (540, "breaker", "", "batch Open", "Overload"),
    (520, "replicas", "3", "5", "QueueWaitAboveTarget"),
    (300, "breaker", "", "batch Closed", "Recovered"),
)
"""Seconds before the end of the recording, and what changed."""


def _chat(time: float, now: float) -> Object:
    """A service under a step of load: it grows, sheds batch requests for a while, and recovers."""
    ago = now - time
    load = 1 / (1 + math.exp((ago - 620) / 55)) - 0.82 / (1 + math.exp((ago - 390) / 45))
    noise = 0.035 * math.sin(time / 7) + 0.03 * math.sin(time / 13)
    wanted = 2 if ago > 900 else 3 if ago > 520 else 5
    ready = 2 if ago > 790 else 3 if ago > 400 else 5
    sequences = 64 if ago > 760 else 96
    changes = [
        {"time": rfc3339.format(now - at), "what": what, "from": old, "to": new, "reason": reason}
        for at, what, old, new, reason in CHAT_CHANGES
        if at >= ago
    ]
    status = status_of(
        ready, wanted, (sequences, 4096), decisions=changes, conditions=healthy(now - 400)
    )
    status["scaling"].update(message="Queue wait 0.31 s against 0.5 s with 5 replicas.")
    status["breaker"].update(
        reason="Overload", message="Pressure 0.62 below 0.9.", since=rfc3339.format(now - 300)
    )
    status["replicaStates"] = [
        {"name": f"chat-6d9f7c5b4-{suffix}", "node": f"gpu-{index}", "stage": "Ready", "since": rfc3339.format(now - 390 - index * 700)}
        for index, suffix in enumerate(("x2x7p", "m4k9d", "q8v2t", "b6n3z", "h5w1c"), 1)
    ]  # fmt: skip
    gauges = _figures(
        max(0.04, 0.16 + 0.62 * load + noise),
        0.031 + 0.013 * load + noise / 30,
        signal_time_to_first_token_seconds=0.42 + 0.3 * load,
        signal_inter_token_latency_seconds=0.0337,
        signal_arrivals_per_second=18.4,
        signal_waiting=7,
        signal_running=311,
        signal_kv_ratio=0.58,
        signal_coverage_ratio=1.0,
        pressure_ratio=0.62,
        cold_start_seconds=93,
    )
    return service("chat", status, gauges)


def _starting(now: float) -> Object:
    message = "Pod vision-0 cannot be scheduled: 0/6 nodes have a free nvidia.com/gpu. Add nodes or lower spec.replicas."
    conditions = healthy(now - 900)
    conditions[0] = condition("Ready", "False", "InsufficientGPU", message, now - 260)
    status = status_of(1, 2, (48, 2048), conditions=conditions)
    status["replicaStates"] = [
        {"name": "vision-0", "stage": "Scheduling", "reason": "InsufficientGPU", "since": rfc3339.format(now - 260)},
        {"name": "vision-1", "stage": "Ready", "node": "gpu-3", "since": rfc3339.format(now - 5000)},
    ]  # fmt: skip
    return service("vision", status, _figures(0.39, 0.041), namespace="team-b", top=4)


def _limited(time: float, now: float, wave: float) -> Object:
    conditions = healthy(now - 900)
    conditions[-1] = condition(
        "ScalingLimited",
        "True",
        "GPUBudget",
        "The load needs 6 replicas; the GPU budget allows 4.",
        now - 700,
    )
    status = status_of(4, 4, (128, 8192), conditions=conditions)
    status["summary"]["breaker"] = "batch open"
    status["breaker"]["load"]["batch"] = "Open"
    status["breaker"].update(
        reason="Overload", message="Pressure 1.34 above 0.9.", since=rfc3339.format(now - 640)
    )
    status["memory"]["peakPercent"] = 76 + round(math.sin(time / 200))
    return service(
        "code", status, _figures(0.81 + 0.1 * wave, 0.047 + 0.002 * wave), namespace="team-b"
    )


def _lost(now: float) -> Object:
    conditions = healthy(now - 900)
    conditions[2] = condition("Degraded", "True", "StaleMetrics", HOSTILE_MESSAGE, now - 120)
    return service(
        "rerank", status_of(2, 2, (32, 2048), conditions=conditions), {}, namespace="team-c", top=3
    )


def chat_key() -> ServiceKey:
    """The service with the most to show."""
    return "team-a", "chat"
