"""An engine's and an operator's real exposition, with values that move at every scrape."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, generate_latest

from fleetkeeper.api.conditions import Reason
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.decided import SUBJECTS, Decided
from fleetkeeper.autoscale.gauges import counts_of
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.reconcile.status.gauges import MAIN, gauges_of_service
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_engine.devices.interface import DeviceMemory
from fleetkeeper_engine.shm.layout import CapBlock, HeartbeatBlock, MiddlewareBlock, SchedulerBlock
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.spec import parse_document
from fleetkeeper_engine.supervisor.control_api.metrics import render_metrics
from fleetkeeper_engine.supervisor.memory.watch import MemoryState
from fleetkeeper_engine.supervisor.state import PodState
from fleetkeeper_gateway.batch import metrics as batch_process
from tests.support.autoscale.control_cases import Loop

BLOCKS = (SchedulerBlock, MiddlewareBlock)
SPEC = {"scaling": {"minReplicas": 1, "maxReplicas": 4}}
REASONS = {"Degraded": Reason.GRANTS_NOT_DEMANDED}
"""Reasons that alerts name; other conditions have any."""
STATUS = {
    "conditions": [
        {"type": kind, "status": "True", "reason": REASONS.get(kind, Reason.GPU_BUDGET)}
        for kind in MAIN
    ],
    "sleep": {"number": 1},
}
SWITCHES = {"supported": True, "instrumentation_disabled": False, "own_rule_closed": False}


class EngineExporter:
    """A supervisor's state whose counters are the number of the scrape."""

    def __init__(self, directory: Path) -> None:
        document = parse_document(
            json.dumps(
                {
                    "contract": 1,
                    "accelerator": "cuda",
                    "model": {"source": "/m", "servedName": "m"},
                    "batching": {"maxSequences": 64, "maxTokens": 2048},
                }
            )
        )
        self._pod = PodState(document, Region.create(directory / "region"), MemoryState(0.8))
        self._scrapes = 0

    def text(self) -> bytes:
        """Return the exposition of one more scrape."""
        self._scrapes += 1
        now, region = time.monotonic(), self._pod.region
        region.write_scheduler(SchedulerBlock(**_counted(SchedulerBlock, self._scrapes)))
        region.write_middleware(MiddlewareBlock(**_counted(MiddlewareBlock, self._scrapes)))
        region.write_heartbeat(HeartbeatBlock(schedule_calls=self._scrapes))
        region.write_cap(
            0, CapBlock(armed=True, reserved_bytes=100, allocated_bytes=75, written=now)
        )
        self._pod.observe_memory(DeviceMemory(60, 100), now)
        return render_metrics(self._pod, ["key"], now, b"")


def _counted(kind: type[Any], number: int) -> dict[str, Any]:
    """Return values of a block: the number in every cell."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        default: Any = field.default
        if isinstance(default, tuple):
            values[field.name] = (type(default[0])(number),) * len(default)
        else:
            values[field.name] = SWITCHES.get(field.name, type(default)(number))
    return values


class OperatorExporter:
    """An operator's registries, with every label set that a rare event would make."""

    def __init__(self, namespace: str, name: str, *, decides: Sequence[str] = SUBJECTS) -> None:
        """In each scrape it has made one more decision about each subject of `decides`."""
        self.decides = decides
        self._metrics = OperatorMetrics()
        self._control = ControlMetrics(self._metrics.registry)
        loop = Loop(settings=ControlSettings(restart_fragmented=True))
        loop.steady(6)
        backlog = Backlog(1e6, loop.now + 3600.0, 300.0, loop.now)
        self._decision = loop.tick(loop.samples(), backlog=backlog)
        self._key = Key(namespace, name)
        report, _ = build_report(self._decision, Allocation(2), loop.memory, loop.now)
        self._control.show(self._key, report.metrics)
        self._metrics.states.show(self._key, gauges_of_service(SPEC, STATUS, 2))

    def text(self) -> bytes:
        """Return the exposition of one more scrape."""
        made = [Decided(subject, "", "", "", "", "") for subject in self.decides]
        self._control.count(self._key, counts_of(self._decision, made))
        for holder in (self._metrics, self._control):
            for metric in vars(holder).values():
                names = getattr(metric, "_labelnames", None)
                if names is None:
                    continue
                one = metric.labels(*names) if names else metric
                if hasattr(one, "observe"):
                    one.observe(0.1)
                elif hasattr(one, "set"):
                    one.set(1)
                else:
                    one.inc()
        return generate_latest(self._metrics.registry)


def batch_text(*services: tuple[str, str], tokens: int = 1_000_000, due_s: float = 3600.0) -> str:
    """Return the exposition of a batch process that leads and has a batch for each of these services."""
    now = time.time()
    due = batch_process.Due(tokens // 1000, tokens, now + due_s)
    batch_process.show_backlog(dict.fromkeys(services, (due,)), now)
    shown = batch_process
    gauges = (shown.BACKLOG, shown.REMAINING, shown.EARLIEST, shown.RATE)
    names = [family.name for gauge in gauges for family in gauge.describe()]
    return generate_latest(REGISTRY.restricted_registry(names)).decode()
