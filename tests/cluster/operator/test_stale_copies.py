"""Nothing is written on the strength of a copy of a service that the API server no longer holds."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import get_args

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.credentials import load_credentials
from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter, Write
from fleetkeeper.reconcile.children import Why
from fleetkeeper.reconcile.plan import Action
from fleetkeeper.runtime.queue import Key
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.reading import version_of
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import operator_world
from tests.support.operators.stale_copies import CASES, CHANGES, FINALIZER, Change, StaleOperator

WRITES = {
    name
    for name, method in inspect.getmembers(KubernetesWriter, inspect.iscoroutinefunction)
    if not name.startswith("_") and name not in {"settled", "create"}
}
"""Those of a service. `create` is for an object of the operator: no copy of a service decides it."""


@pytest_asyncio.fixture
async def operator(control_plane: ControlPlane) -> AsyncIterator[StaleOperator]:
    async with operator_world(control_plane, "operator-stale") as world:
        try:
            credentials = await load_credentials(world.operator_kubeconfig)
            async with KubernetesClient(credentials) as client:
                yield StaleOperator(world, client)
        finally:
            for kind, name in list(world.objects):
                if kind == INFERENCE_SERVICE.kind:
                    change = {"metadata": {"finalizers": None}}
                    await world.patch(INFERENCE_SERVICE, name, change)


async def test_each_kind_of_write_has_a_case_and_is_made_for_a_service_as_it_is(
    operator: StaleOperator,
) -> None:
    for case in CASES:
        go = await case.prepare(operator, await operator.service(case.name))
        await go()
        assert operator.accepted, f"{case.name} writes nothing"
        operator.accepted.clear()
    assert operator.called.names == WRITES
    assert {case.why for case in CASES if case.why} == set(Why)
    assert {case.action for case in CASES if case.action} == set(get_args(Action))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_none_is_made_after_a_change_that_no_watch_has_shown(
    operator: StaleOperator, change: Change
) -> None:
    made: dict[str, list[Write]] = {}
    still_cached: list[str] = []
    for case in CASES:
        live = await operator.service(case.name, finalizers=[FINALIZER])
        go = await case.prepare(operator, live)
        present = await change(operator.world, live)
        await go()
        if operator.accepted:
            made[case.name] = operator.accepted.copy()
        operator.accepted.clear()
        entry = operator.cache.service(Key(operator.world.namespace, case.name))
        shown = None if entry is None else entry.version
        if shown != (version_of(present) if present else None):
            still_cached.append(case.name)
    assert (made, still_cached) == ({}, [])
