"""Any valid spec after any other: it converges, harms nothing, and forgets how it got there."""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.lanes import keep_first
from tests.support.operators.operator_world import Live, World, condition, operator_world
from tests.support.reconcile.random_specs import random_spec

TRANSITIONS, MORE_TRANSITIONS = 12, int(os.environ.get("FLEETKEEPER_TEST_TRANSITIONS", "60"))
"""In all; raise it for a long run."""
SEED = int(os.environ.get("FLEETKEEPER_TEST_SEED", "20261"))


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-chain") as found:
        yield found


def _spec(rng: random.Random) -> Live:
    """Any spec but for the number of pods, which are real objects here, and never paused or suspended.

    A paused service keeps the children that it had: there the path is the point.
    """
    spec = random_spec(rng)
    spec.pop("paused", None)
    spec.pop("suspend", None)
    spec.pop("replicas", None)
    if rng.random() < 0.5:
        spec["replicas"] = rng.randint(0, 2)
    scaling = {key: spec.get("scaling", {}).get(key) for key in ("scaleDownDelaySeconds",)}
    spec["scaling"] = {key: value for key, value in scaling.items() if value is not None}
    spec["scaling"] |= {"minReplicas": 1, "maxReplicas": rng.randint(1, 3)}
    spec.get("breaker", {}).pop("fallbackReplicas", None)
    # A router that no node takes leaves the address where it was, which depends on the path.
    policy = spec.get("routing", {}).get("policy", "LeastLoaded")
    spec["routing"] = {"policy": policy, "replicas": 1}
    return spec


def _manifest(name: str, spec: Live) -> Live:
    return {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def _is_reported(world: World, name: str) -> bool:
    """The status is about the current generation, with a reason from the closed list."""
    live = world.fis(name)
    if live is None:
        return False
    generation = live["metadata"]["generation"]
    ready = condition(live, "Ready")
    return (
        (live.get("status") or {}).get("observedGeneration") == generation
        and ready.get("observedGeneration") == generation
        and ready.get("reason") in set(Reason)
    )


def _children(world: World, name: str) -> dict[str, Any]:
    """What the service asks of its children; held replicas, its UID and the hash of its name left out."""
    found = {}
    uid = (world.fis(name) or {})["metadata"]["uid"]
    for (kind, child), live in sorted(world.children(name).items()):
        spec = json.loads(json.dumps(live.get("spec") or {}))
        if kind == "Deployment":
            spec.pop("replicas", None)
            meta = spec["template"]["metadata"]
            meta.get("annotations", {}).pop(ANNOTATION_TEMPLATE_HASH, None)
        for key in [key for key in spec if key.startswith("clusterIP")]:
            spec.pop(key)
        text = json.dumps(
            {
                "spec": spec,
                "data": live.get("data"),
                "labels": live["metadata"].get("labels"),
                "subjects": live.get("subjects"),
                "roleRef": live.get("roleRef"),
            },
            sort_keys=True,
        )
        # The namespace first: its random end may continue with the number of a service.
        for known, word in ((world.namespace, "NAMESPACE"), (name, "NAME"), (uid, "UID")):
            text = text.replace(known, word)
        found[f"{kind} {child.replace(name, 'NAME')}"] = json.loads(text)
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "transitions", keep_first(1, (TRANSITIONS, MORE_TRANSITIONS), pytest.mark.exhaustive)
)
async def test_any_path_ends_where_the_last_spec_says(world: World, transitions: int) -> None:
    print(f"seed {SEED}, {transitions} transitions")
    rng = random.Random(SEED)
    operator = await world.operator().start().leads()
    # Changed side by side, each round; a long run takes 40 rounds.
    names = [f"chain-{number:02d}" for number in range(max(6, transitions // 40))]
    specs: dict[str, Live] = {}
    done = refused = 0
    while done < transitions:
        for name in names:
            spec = _spec(rng)
            if await _accepted(world, _manifest(name, spec)):
                specs[name] = spec
                done += 1
            else:
                refused += 1
        for name in specs:
            await world.until(f"{name} reported", partial(_is_reported, world, name))
        assert operator.alive
    print(f"{done} transitions, {refused} specs refused by the API server")
    assert refused < done
    await world.quiet(3.0)
    mark = world.mark()
    twins = {name: name.replace("chain", "twins") for name in specs}
    for name, twin in twins.items():
        await world.create(_manifest(twin, specs[name]))
    for twin in twins.values():
        await world.until(f"{twin} reported", partial(_is_reported, world, twin))
    await world.quiet(3.0)
    compared = 0
    for name, twin in twins.items():
        if _is_blocked(world, twin):  # such a spec is refused, and leaves what ran before as it was
            assert _is_blocked(world, name), (name, specs[name])
            continue
        assert _children(world, name) == _children(world, twin), (name, specs[name])
        compared += 1
    assert compared
    late = [write for write in world.writes(mark) if write.name.startswith("chain")]
    assert {write.resource for write in late} <= {"inferenceservices/status"}, late
    assert all(write.namespace == world.namespace for write in world.writes())
    assert not [
        write
        for write in world.writes()
        if write.verb == "delete" and (write.resource, write.name) in _engines(names)
    ]
    assert await operator.metric("fleetkeeper_digest_mismatches_total") in {None, 0.0}


def _engines(names: list[str]) -> set[tuple[str, str]]:
    return {("deployments", name) for name in names}


def _is_blocked(world: World, name: str) -> bool:
    """Whether the operator refused the spec (an option or profile that does not fit)."""
    return condition(world.fis(name), "Stalled").get("reason") in {
        Reason.BAD_ENGINE_OPTION,
        Reason.UNKNOWN_PROFILE,
        Reason.INVALID_SPEC,
    }


async def _accepted(world: World, manifest: Live) -> bool:
    """Creates or replaces the service; whether the API server took the spec.

    The generator meets the schema, not every rule of the API server (no two adapters of one name).
    """
    name = manifest["metadata"]["name"]
    live = await world.client.read(INFERENCE_SERVICE, world.namespace, name)
    try:
        if live is None:
            await world.create(manifest)
        else:
            meta = {
                "name": name,
                "namespace": world.namespace,
                "resourceVersion": live["metadata"]["resourceVersion"],
            }
            path = INFERENCE_SERVICE.path(world.namespace, name)
            body = {**manifest, "metadata": meta}
            await world.client.request("PUT", path, body=body)
    except ApiError as problem:
        if problem.status in {409, 422}:
            return False
        raise
    return True
