"""kill -9 at every write point: what is left is taken up, and ends as if nothing had happened."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import Live, World, is_ready, operator_world, service

POINTS = ("before", "applied", "answered")
STATUS, EVENT = "InferenceService/status", "Event"
Matrix = list[tuple[int, str]]


def one_of_each_kind(writes: list[str]) -> Matrix:
    """Return the first and the last child, the first status and the first event, the points in turn."""
    kinds = [line.split()[1] for line in writes]
    children = [number for number, kind in enumerate(kinds) if kind not in {STATUS, EVENT}]
    chosen = {children[0], children[-1], kinds.index(STATUS), kinds.index(EVENT)}
    return [(number + 1, POINTS[turn % 3]) for turn, number in enumerate(sorted(chosen))]


def every_point(writes: list[str]) -> Matrix:
    """Return every write with every point."""
    return [(number, point) for number in range(1, len(writes) + 1) for point in POINTS]


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-crash") as found:
        yield found


def _state(world: World, name: str) -> dict[str, Any]:
    """The children of a service, its name and what the server made up left out."""
    return {
        f"{kind} {child.replace(name, 'NAME')}": json.loads(
            json.dumps(_lean(live), sort_keys=True).replace(name, "NAME")
        )
        for (kind, child), live in sorted(world.children(name).items())
    }


def _lean(live: Live) -> Live:
    """What was asked for; the hash of the template, which covers the name, is left out."""
    live = copy.deepcopy(live)
    template = (live.get("spec") or {}).get("template", {}).get("metadata", {})
    template.get("annotations", {}).pop(ANNOTATION_TEMPLATE_HASH, None)
    spec = {
        key: value
        for key, value in (live.get("spec") or {}).items()
        if not key.startswith("clusterIP")
    }
    return {
        "labels": live["metadata"].get("labels"),
        "spec": spec,
        "data": live.get("data"),
        "owners": [owner["name"] for owner in live["metadata"].get("ownerReferences") or []],
    }


@pytest.mark.parametrize(
    ("routing", "matrix"),
    [
        ("LeastLoaded", one_of_each_kind),
        pytest.param("LeastLoaded", every_point, marks=pytest.mark.exhaustive),
        pytest.param("None", every_point, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.timeout(900)
async def test_a_crash_at_any_write_leaves_no_trace(
    world: World, routing: str, matrix: Callable[[list[str]], Matrix]
) -> None:
    """Writes of a creation, a fresh service for each; the reference never crashed.

    tests/unit/reconcile/test_world.py does the same with every point, without an API server.

    No child is created twice, none is deleted, and everything ends as the reference did.
    """
    file = world.directory / "writes"
    operator = world.operator().start(WRITES_FILE=str(file))
    await world.create(_service("reference", routing))
    await world.ready("reference")
    await world.quiet(1.0)
    await operator.stop()
    crash_points = matrix(file.read_text().splitlines())
    reference = _state(world, "reference")
    assert len(reference) >= 5

    mark = world.mark()
    names = []
    crashes = 0
    for number, point in crash_points:
        name = f"x{number}-{point}"
        names.append(name)
        operator.start(KILL_AT=f"{name}:{number}:{point}")
        await world.create(_service(name, routing))
        await world.until(
            f"{name} crashed or ready", partial(_is_over, world, operator, name), GUARD_S
        )
        if operator.alive:  # the last writes come after the service is ready
            await world.quiet()
        crashes += not operator.alive
        if operator.alive:
            await operator.stop()
    await operator.start().leads()
    await world.ready(*names)
    await world.quiet(1.0)
    for name in names:
        assert _state(world, name) == reference, name
    created = Counter(
        (write.resource, write.name)
        for write in world.writes(mark)
        if write.code == 201 and write.name
    )
    assert max(created.values()) == 1, created.most_common(3)
    assert not [write for write in world.writes(mark) if write.verb == "delete"]
    print(f"{routing}: {crashes} crashes at {len(crash_points)} points")
    # A service may need a status less than the reference.
    assert crashes >= 0.75 * len(crash_points)


def _service(name: str, routing: str) -> Live:
    return service(name, replicas=1, routing={"policy": routing})


def _is_over(world: World, operator: OperatorProcess, name: str) -> bool:
    return not operator.alive or is_ready(world.fis(name))
