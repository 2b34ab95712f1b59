"""Services of a namespace that cannot be read are not decided on, and hold nobody up."""

from __future__ import annotations

from typing import Any

import pytest

from fleetkeeper.reconcile.context import PlanContext, default_context
from fleetkeeper.reconcile.plan import Plan
from fleetkeeper.reconcile.types import Snapshot
from fleetkeeper.runtime.queue import Key, KeyedQueue
from fleetkeeper.runtime.reconciler import controller as module
from fleetkeeper.runtime.reconciler.controller import Controller
from fleetkeeper.runtime.reconciler.outcome import Outcome
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from tests.support.operators.contained import new_defects

FIRST, SECOND = Key("a", "chat"), Key("b", "chat")


class Executor:
    """Carries nothing out."""

    async def carry_out(self, key: Key, *_: Any) -> Outcome:
        return Outcome(key, {})


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The namespaces decided on, and whether the service there might take a newer engine."""
    found: list[tuple[str, bool]] = []

    def decide(snapshot: Snapshot, context: PlanContext, now: float) -> Plan:
        found.append((snapshot.resource["metadata"]["namespace"], snapshot.may_update_engine))
        return Plan()

    monkeypatch.setattr(module, "decide_plan", decide)
    return found


def controller_of(cache: Cache) -> Controller:
    return Controller(
        queue=KeyedQueue(monotonic=lambda: 0.0, jitter=lambda seconds: seconds),
        cache=cache,
        client=None,  # type: ignore[arg-type] # nothing is read
        executor=Executor(),  # type: ignore[arg-type]
        metrics=OperatorMetrics(),
        defects=new_defects(),
        context=default_context(),
        ledger=GpuLedger(cache, default_context().gpu_budget),
        now=lambda: 0.0,
        monotonic=lambda: 0.0,
    )


def put(cache: Cache, key: Key) -> None:
    """A ready service that waits for its turn to take a newer engine by itself."""
    cache.put_service(
        {
            "metadata": {
                "namespace": key.namespace,
                "name": key.name,
                "uid": f"u-{key}",
                "resourceVersion": "1",
            },
            "spec": {"rollout": {"engineUpdates": "Automatic"}},
            "status": {
                "engine": {"updateAvailable": "cuda-2"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
    )


async def test_a_service_of_a_namespace_that_cannot_be_read_is_not_decided_on(
    decided: list[tuple[str, bool]],
) -> None:
    cache = Cache(now=lambda: 0.0, changed=lambda _key: None)
    put(cache, FIRST)
    controller = controller_of(cache)
    cache.hold("a")
    await controller.reconcile(FIRST)
    assert decided == []
    cache.resume("a")
    await controller.reconcile(FIRST)
    assert [namespace for namespace, _ in decided] == ["a"]


async def test_its_turn_to_take_a_newer_engine_passes_to_the_next(
    decided: list[tuple[str, bool]],
) -> None:
    cache = Cache(now=lambda: 0.0, changed=lambda _key: None)
    for key in (FIRST, SECOND):
        put(cache, key)
    controller = controller_of(cache)
    await controller.reconcile(FIRST)
    await controller.reconcile(SECOND)
    assert decided == [("a", True), ("b", False)]
    cache.hold("a")
    await controller.reconcile(SECOND)
    assert decided[-1] == ("b", True)
