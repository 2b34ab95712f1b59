"""Wake marks on a real API server: with the rights of the chart, and from the mark to the replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from fleetkeeper.adapters.clock import SystemClock
from fleetkeeper.adapters.kubernetes.credentials import load_credentials
from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.api.names import ANNOTATION_WAKE
from fleetkeeper.common.sleep import Wake
from fleetkeeper.runtime.queue import KeyedQueue
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.wake_marks import WakeMarks
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_contract.sleep import SleepState, WakeMark
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.chart.gateway_chart import gateway_values
from tests.support.chart.helm_chart import HelmError, helm, only, rendered
from tests.support.gateway.gateway_world import MARKS, role, until
from tests.support.operators.manual_node import bound_pod, end_pod, manual_node, report
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import Live, World, condition, operator_world, service
from tests.support.operators.reason_checks import reports
from tests.support.operators.wake_marks import (
    CONFIG_MAP,
    mark,
    operator_with_marks,
    settings_with_marks,
)


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-marks") as made:
        yield made


def asleep(world: World, number: int) -> Live:
    """Return the status of a service that sleeps for the `number`th time."""
    status = (world.fis() or {})["status"]
    since = "2026-01-01T00:00:00Z"
    return {**status, "sleep": {"number": number, "state": SleepState.ASLEEP.value, "since": since}}


def sleep_of(world: World, name: str = "chat") -> Live:
    return ((world.fis(name) or {}).get("status") or {}).get("sleep") or {}


def replicas(world: World) -> object:
    return (world.get("Deployment", "chat") or {}).get("spec", {}).get("replicas")


def pods(world: World, name: str) -> list[str]:
    """Return the names of a service's pods, also of those that end."""
    return [pod for (kind, pod) in world.objects if kind == "Pod" and pod.startswith(f"{name}-")]


async def operator_of_sleeping_service(world: World, **more: Any) -> OperatorProcess:
    """Start an operator, and let the service `chat` sleep for the 7th time."""
    operator = await operator_with_marks(world)
    await world.until("the ConfigMap", lambda: world.get("ConfigMap", MARKS))
    scaling = {"minReplicas": 1, "maxReplicas": 1, "sleep": {}}
    await world.create(service(access="Gateway", scaling=scaling, **more))
    await world.ready()
    await operator.stop()
    path = INFERENCE_SERVICE.path(world.namespace, "chat", "status")
    await world.client.request(
        "PATCH",
        path,
        body={"status": asleep(world, 7)},
        content_type="application/merge-patch+json",
    )
    await operator.start().leads()
    await world.until("asleep", lambda: replicas(world) == 0)
    await world.quiet()
    return operator


async def test_the_annotation_with_the_number_wakes_a_service_by_hand(world: World) -> None:
    operator = await operator_of_sleeping_service(world)
    since = world.mark()
    await world.patch(INFERENCE_SERVICE, "chat", annotated("6"))
    await world.quiet()
    assert world.writes(since) == [], "the annotation of an earlier sleep"
    await world.patch(INFERENCE_SERVICE, "chat", annotated("7"))
    await world.until("awake", lambda: replicas(world) == 1)
    assert operator.tracebacks() == []


def annotated(number: str) -> Live:
    return {"metadata": {"annotations": {ANNOTATION_WAKE: number}}}


@pytest.mark.parametrize("is_down", [False, True], ids=["while it leads", "while it is down"])
async def test_a_mark_wakes_its_service(world: World, is_down: bool) -> None:
    """Also for a new leader. The absent ConfigMap is created once, and nothing is written at rest."""
    operator = await operator_of_sleeping_service(world)
    uid = (world.fis() or {})["metadata"]["uid"]
    since = world.mark()
    await mark(world, **{uid: "6.realtime", "u-other": "7.realtime"})
    await world.quiet()
    assert world.writes(since) == [], "a mark of an earlier sleep, and one of another service"
    if is_down:
        await operator.stop()
    await mark(world, **{uid: "7.realtime"})
    if is_down:
        await operator.start().leads()
    await world.until("awake", lambda: replicas(world) == 1)
    await world.wait_for_event(
        "chat", "Normal", "starts its replicas with the rank of tier realtime"
    )
    assert sleep_of(world)["number"] == 7
    assert await operator.metric("fleetkeeper_wake_marks") == 2
    await world.delete(CONFIG_MAP, MARKS)
    await world.until(
        "created again",
        lambda: (found := world.get("ConfigMap", MARKS)) is not None and "data" not in found,
    )
    assert operator.tracebacks() == []


@pytest.mark.exhaustive  # a start may take a minute at least
async def test_an_image_that_cannot_be_pulled_ends_the_wake_and_a_change_wakes_it(
    world: World,
) -> None:
    """Without a change the next mark waits for a minute, and costs no start before."""
    operator = await operator_of_sleeping_service(world, rollout={"startupSeconds": 60})
    uid = (world.fis() or {})["metadata"]["uid"]
    with manual_node(world) as selector:
        await world.change(placement={"nodeSelector": selector})
        await mark(world, **{uid: "7.standard"})
        pod = await bound_pod(world, "chat")
        message = 'Back-off pulling image "x": ErrImagePull: not found'
        waiting = {"reason": "ImagePullBackOff", "message": message}
        await report(world, "chat", {"waiting": waiting})
        await world.until("the failed start", lambda: sleep_of(world).get("failures") == 1)
        assert (sleep_of(world)["state"], sleep_of(world)["number"]) == ("Asleep", 8)
        await reports(world, "chat", "Ready", "False", "WakeFailed", "ImagePull", "not found")
        await world.until("no replica", lambda: replicas(world) == 0)
        end_pod(world, pod)
        await world.quiet()

        since = world.mark()
        await mark(world, **{uid: "8.standard"})
        await world.quiet()
        assert world.writes(since) == []
        await world.change(placement={"nodeSelector": dict.fromkeys(selector)})
        await world.until(
            "answers", lambda: condition(world.fis(), "Available").get("status") == "True"
        )
    assert sleep_of(world).keys() == {"number", "since", "startSeconds"}
    assert operator.tracebacks() == []


async def test_the_rights_of_the_chart_are_enough_and_allow_no_mark(world: World) -> None:
    """A namespaced operator has these alone in its own namespace."""
    user = f"{world.user}-namespaced"
    objects = rendered(gateway_values("defaults", namespaces=["team-a"]))
    rules = only(objects, "Role", f"{MARKS}-operator")["rules"]
    granted = role("Role", "wake-marks", world.namespace, rules, user)
    manifest = {"apiVersion": "v1", "kind": "List", "items": granted}
    world.plane.kubectl("apply", "-f", "-", input=json.dumps(manifest))
    metrics, clock = OperatorMetrics(), SystemClock()
    async with KubernetesClient(
        await load_credentials(world.plane.user_kubeconfig(user))
    ) as client:
        marks = WakeMarks(
            world.namespace,
            MARKS,
            cache=Cache(now=clock.now, changed=lambda _: None),
            queue=KeyedQueue(monotonic=clock.monotonic, jitter=clock.jitter),
            writer=KubernetesWriter(client, fence=lambda: None),
            metrics=metrics,
            jitter=clock.jitter,
        )
        tasks = [
            asyncio.create_task(marks.reflector(client).run()),
            asyncio.create_task(marks.keep()),
        ]
        try:
            await world.until("the ConfigMap", lambda: world.get("ConfigMap", MARKS))
            await mark(world, u="7.realtime")
            await until("the mark", lambda: marks.of("u") == Wake(True, WakeMark(7, Tier.REALTIME)))
        finally:
            for task in tasks:
                task.cancel()
        with pytest.raises(ApiError, match="403"):
            await client.request("PATCH", CONFIG_MAP.path(world.namespace, MARKS), body={})
        with pytest.raises(ApiError, match="403"):
            await client.request("GET", CONFIG_MAP.path(world.namespace))
    assert metrics.registry.get_sample_value("fleetkeeper_errors_total") is None


@pytest.mark.parametrize("release", ["fleetkeeper", "another"])
async def test_an_upgrade_accepts_the_marks_that_the_operator_of_the_release_created(
    world: World, tmp_path: Path, release: str
) -> None:
    """They are not of an earlier revision if the gateway was off in it, or if a rollback came before."""
    values = {**settings_with_marks(world), "FLEETKEEPER_HELM_RELEASE": release}
    operator = world.operator(env=values)
    await operator.start().leads()
    await world.until("the ConfigMap", lambda: world.get("ConfigMap", MARKS))
    marks = only(rendered(gateway_values("defaults")), "ConfigMap", MARKS)
    del marks["metadata"]["namespace"]
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("{apiVersion: v2, name: marks, version: 0.1.0}")
    (chart / "templates" / "marks.yaml").write_text(yaml.safe_dump(marks))
    upgrade = partial(
        helm,
        *("upgrade", "--install", "fleetkeeper", str(chart)),
        *("--namespace", world.namespace, "--kubeconfig", str(world.plane.kubeconfig)),
    )
    if release == "fleetkeeper":
        await asyncio.to_thread(upgrade)
    else:
        with pytest.raises(HelmError, match="cannot be imported"):
            await asyncio.to_thread(upgrade)


async def test_a_new_service_without_room_sleeps_until_a_mark_and_a_free_accelerator(
    world: World,
) -> None:
    """Its pending pod goes, so that the next free accelerator is for a service with requests."""
    label = {f"{world.namespace}/only": "one"}
    world.plane.add_nodes(1, gpus=1, labels=label)
    own = {
        "access": "Gateway",
        "scaling": {"maxReplicas": 1, "sleep": {}},
        "placement": {"nodeSelector": label},
    }
    operator = await operator_with_marks(world, waits={"reconcile.sleep.REPLACE_AFTER_S": 3.0})
    await world.until("the ConfigMap", lambda: world.get("ConfigMap", MARKS))
    await mark(world)
    await world.create(service("first", **own))
    await world.ready("first")
    await world.create(service("second", **own))
    await world.until("never started", lambda: sleep_of(world, "second").get("neverStarted"))
    await world.until("no pod", lambda: pods(world, "second") == [])
    await world.quiet()
    ready = condition(world.fis("second"), "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "NeverStarted")
    assert "nvidia.com/gpu" in ready["message"]
    events = await world.wait_for_event("second", "Normal", "The service never started")
    assert [event["reason"] for event in events] == ["NeverStarted"]
    since = world.mark()
    await world.delete(INFERENCE_SERVICE, "first")
    await world.until("the accelerator is free", lambda: pods(world, "first") == [])
    await world.quiet()
    assert [write for write in world.writes(since) if "second" in write.name] == []
    second = (world.fis("second") or {})["metadata"]["uid"]
    await mark(world, **{second: f"{sleep_of(world, 'second')['number']}.standard"})
    await world.until(
        "answers", lambda: condition(world.fis("second"), "Available").get("status") == "True"
    )
    assert sleep_of(world, "second").keys() == {"number", "since", "startSeconds"}
    assert condition(world.fis("second"), "Ready")["reason"] == "AllReplicasReady"
    assert operator.tracebacks() == []
