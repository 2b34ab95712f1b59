"""A namespace on a real API server with an operator process in it, and ways to wait for events.

The view of the cluster here is a list and a watch of its own, with the administrator's rights: it
shares no cache, no reflector and no digest with what is tested.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import aiohttp

from fleetkeeper.adapters.kubernetes.client import KubernetesClient, load_configuration
from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.resources import (
    CHILDREN,
    EVENT,
    INFERENCE_SERVICE,
    POD,
    REPLICA_SET,
    Resource,
)
from fleetkeeper.api.names import LABEL_SERVICE
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.helm_chart import only, rendered
from tests.support.plane_state import mend, state_of

CRDS = Path(__file__).parents[2] / "crds"
HOOKED = (sys.executable, str(Path(__file__).with_name("operator_entry.py")))
"""The operator with a hook at its writes, which kills it where KILL_AT says."""
SEEN: tuple[Resource, ...] = (INFERENCE_SERVICE, *CHILDREN.values(), REPLICA_SET, POD)
WRITE_VERBS = {"create", "update", "patch", "delete", "deletecollection"}
PATIENCE_S = 60.0
"""Of every wait: events end it, so it only bounds how long a failure takes on a busy machine."""
MARKER_PATH = "/api/v1/namespaces/kube-public/configmaps/fleetkeeper-release"
"""The operator looks there for a cluster-wide release; where there is none, it may not."""
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
Live = dict[str, Any]


@lru_cache(maxsize=1)
def operator_rules() -> list[dict[str, Any]]:
    """The operator's rights: those that the chart gives it, so that every test is held to them."""
    objects = rendered()
    roles = [
        only(objects, "ClusterRole", "fleetkeeper"),
        only(objects, "Role", "fleetkeeper-leader"),
    ]
    return [rule for role in roles for rule in role["rules"]]


def service(name: str = "chat", **spec: Any) -> Live:
    """An InferenceService that fits the fake nodes; `spec` replaces whole sections."""
    return {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.kind,
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "hf://example/tiny", "revision": COMMIT},
            "engine": {"profile": "cuda"},
            "resources": {
                "accelerator": {"resource": "nvidia.com/gpu", "count": 1},
                "cpu": "100m",
                "memory": "128Mi",
            },
            "routing": {"policy": "None"},
            **spec,
        },
    }


def condition(live: Live | None, kind: str) -> Live:
    """A condition of an object, empty where it has none."""
    found = ((live or {}).get("status") or {}).get("conditions") or []
    return next((item for item in found if item["type"] == kind), {})


def is_ready(live: Live | None) -> bool:
    """Whether the service is Ready in its current generation."""
    ready = condition(live, "Ready")
    return bool(
        live is not None
        and ready.get("status") == "True"
        and ready.get("observedGeneration") == live["metadata"]["generation"]
        and live["status"].get("observedGeneration") == live["metadata"]["generation"]
    )


@dataclass(frozen=True)
class Request:
    """A request as the audit log has it."""

    verb: str
    resource: str
    namespace: str
    name: str
    code: int


@dataclass
class OperatorProcess:
    """One operator process, started and ended as often as a test wants."""

    world: World
    name: str = "a"
    env: dict[str, str] = field(default_factory=dict)
    kubeconfig: Path | None = None
    command: tuple[str, ...] = (str(Path(sys.executable).with_name("fleetkeeper")), "run")
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    @property
    def log(self) -> Path:
        """Everything that it said."""
        return self.world.directory / f"operator-{self.name}.log"

    def start(self, **env: str) -> OperatorProcess:
        """Starts it; `env` holds for this start alone."""
        self.port = free_ports(1)[0]
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("FLEETKEEPER_") or key == "FLEETKEEPER_CACHE"
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env={
                    **clean,
                    "KUBECONFIG": str(self.kubeconfig or self.world.operator_kubeconfig),
                    "POD_UID": self.name,
                    "FLEETKEEPER_NAMESPACES": json.dumps([self.world.namespace]),
                    "FLEETKEEPER_OPERATOR_NAMESPACE": self.world.namespace,
                    "FLEETKEEPER_LISTEN_ADDRESS": "127.0.0.1",
                    "FLEETKEEPER_LISTEN_PORT": str(self.port),
                    # Fake pods have addresses and nothing behind them: nothing is to call them.
                    "FLEETKEEPER_CONTROL_ENABLED": "false",
                    "FLEETKEEPER_DIRECT_READS": "false",
                    **self.env,
                    **env,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def peak_bytes(self) -> int:
        """Return the largest resident set that the process has had."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        row = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(row.split()[1]) * 1024

    def tracebacks(self) -> list[str]:
        """Return the log lines with a traceback, but for those in which kopf reports a broken watch."""
        return [
            line
            for line in self.log.read_text().splitlines()
            if "Traceback" in line and '"logger": "kopf.' not in line
        ]

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()

    async def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, once it has ended; -9 after SIGKILL."""
        assert self.process is not None
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(self.process.wait)

    async def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.signal(signal.SIGTERM)
        return await self.ended()

    async def metric(self, name: str) -> float | None:
        """A metric without labels, or the sum over its labels; None where nothing listens."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{self.port}/metrics") as answer,
            ):
                text = await answer.text()
        except aiohttp.ClientError:
            return None
        values = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith((f"{name} ", f"{name}{{"))
        ]
        return sum(values) if values else None

    async def leads(self, timeout_s: float = PATIENCE_S) -> OperatorProcess:
        """Waits until it leads."""
        async with asyncio.timeout(timeout_s):
            while await self.metric("fleetkeeper_leader") != 1.0:
                assert self.alive, self.log.read_text()[-3000:]
                await asyncio.sleep(0.05)
        return self


class World:
    """One namespace: what is in it now, and what the operator asked of the API server."""

    def __init__(self, plane: ControlPlane, namespace: str, client: KubernetesClient) -> None:
        self.plane = plane
        self.namespace = namespace
        self.client = client
        self.directory = Path(tempfile.mkdtemp(prefix=f"{namespace}-"))
        self.user = f"operator-{namespace}"
        self.operator_kubeconfig = plane.user_kubeconfig(self.user)
        self.objects: dict[tuple[str, str], Live] = {}
        self.processes: list[OperatorProcess] = []
        self._changed = asyncio.Event()

    def operator(self, name: str = "a", **options: Any) -> OperatorProcess:
        """A process of the operator, not started yet."""
        process = OperatorProcess(self, name=name, **options)
        self.processes.append(process)
        return process

    # -- seeing -----------------------------------------------------------------------------------

    def get(self, kind: str, name: str) -> Live | None:
        """An object as it is now."""
        return self.objects.get((kind, name))

    def fis(self, name: str = "chat") -> Live | None:
        """An InferenceService as it is now."""
        return self.get(INFERENCE_SERVICE.kind, name)

    def children(self, name: str = "chat") -> dict[tuple[str, str], Live]:
        """The children of a service by kind and name."""
        kinds = {kind.value for kind in CHILDREN}
        return {
            key: live
            for key, live in self.objects.items()
            if key[0] in kinds and (live["metadata"].get("labels") or {}).get(LABEL_SERVICE) == name
        }

    async def until(
        self, what: str, holds: Callable[[], object], timeout_s: float = PATIENCE_S
    ) -> None:
        """Waits until `holds()` is true, looking at every event.

        Raises:
            AssertionError: it did not come true in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    mend(self.plane)
                    self._changed.clear()
                    with suppress(
                        TimeoutError
                    ):  # what is no event (the end of a process) is seen too
                        await asyncio.wait_for(self._changed.wait(), 0.2)
        except TimeoutError:
            logs = "\n".join(p.log.read_text()[-3000:] for p in self.processes)
            cluster = await asyncio.to_thread(state_of, self.plane)
            raise AssertionError(f"{what}: not within {timeout_s:g} s\n{logs}\n{cluster}") from None

    async def ready(self, *names: str) -> None:
        """Waits until the services (default: chat) are Ready in their current generation."""
        for name in names or ("chat",):
            await self.until(f"{name} ready", partial(self._is_ready, name))

    def _is_ready(self, name: str) -> bool:
        return is_ready(self.fis(name))

    def mark(self) -> int:
        """A place in the audit log."""
        return self.plane.audit_log.stat().st_size

    def requests(self, since: int = 0) -> list[Request]:
        """What the operator asked of the API server since a mark; watches, lease and the posting of
        events left out, since they are counted nowhere.
        """
        with self.plane.audit_log.open("rb") as lines:
            lines.seek(since)
            data = lines.read()
        found = []
        for line in data.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # the last line may be half written
            if event["user"].get("username") != self.user or event["stage"] != "ResponseComplete":
                continue
            reference = event.get("objectRef") or {}
            resource = "/".join(
                part
                for part in (reference.get("resource", ""), reference.get("subresource", ""))
                if part
            )
            if event["verb"] == "watch" or resource == "leases":
                continue
            if not resource:
                continue  # discovery and OpenAPI
            found.append(
                Request(
                    event["verb"],
                    resource,
                    reference.get("namespace", ""),
                    reference.get("name", ""),
                    event["responseStatus"]["code"],
                )
            )
        return found

    def writes(self, since: int = 0, *, events: bool = False) -> list[Request]:
        """The writes among them."""
        return [
            request
            for request in self.requests(since)
            if request.verb in WRITE_VERBS and (events or request.resource != "events")
        ]

    def accepted_writes(self, since: int) -> Counter[str]:
        """Return the number of writes that the API server accepted, by resource.

        A write that carries a resourceVersion is refused with 409 and tried again when the object
        changed in between, which the Deployment controller may do at any time. No other refusal is
        expected.
        """
        writes = self.writes(since)
        unexpected = [write for write in writes if write.code >= 300 and write.code != 409]
        assert not unexpected, unexpected
        return Counter(write.resource for write in writes if write.code < 300)

    async def quiet(self, seconds: float = 2.0) -> None:
        """Waits until the operator has asked nothing of the API server for so long."""
        loop = asyncio.get_running_loop()
        last, seen = loop.time(), -1
        async with asyncio.timeout(PATIENCE_S * 2):
            while loop.time() - last < seconds:
                count = len(self.requests())
                if count != seen:
                    last, seen = loop.time(), count
                await asyncio.sleep(0.2)

    # -- doing ------------------------------------------------------------------------------------

    @contextmanager
    def cluster_rights(self) -> Iterator[None]:
        """Gives the operator its rights in every namespace, for as long as this lasts."""
        name = f"test-{self.user}"
        self.plane.kubectl(
            *("create", "clusterrolebinding", name, f"--user={self.user}"),
            "--clusterrole=fleetkeeper-test-operator",
        )
        try:
            yield
        finally:
            self.plane.kubectl("delete", "clusterrolebinding", name)

    def share_rights(self, namespace: str) -> None:
        """Create a second namespace in which the operator has the same rights."""
        _grant(self.plane, namespace, self.user)

    async def create(self, manifest: Live) -> Live:
        """Creates an InferenceService."""
        body = {**manifest, "metadata": {**manifest["metadata"], "namespace": self.namespace}}
        path = INFERENCE_SERVICE.path(self.namespace)
        return await self.client.request("POST", path, body=body, timeout_s=30)

    async def patch(self, resource: Resource, name: str, patch: Mapping[str, Any]) -> Live:
        """A merge patch, as a person with kubectl would do it."""
        return await self.client.request(
            "PATCH",
            resource.path(self.namespace, name) + "?fieldManager=kubectl-edit",
            body=patch,
            content_type="application/merge-patch+json",
            timeout_s=30,
        )

    async def patch_or_create(self, resource: Resource, manifest: Live) -> Live:
        """A server-side apply by a person."""
        return await self.client.request(
            "PATCH",
            resource.path(self.namespace, manifest["metadata"]["name"])
            + "?fieldManager=restore&force=true",
            body=manifest,
            content_type="application/apply-patch+yaml",
            timeout_s=30,
        )

    async def change(self, name: str = "chat", **spec: Any) -> Live:
        """Patch a service's spec, and return once this world has seen the change.

        Otherwise a test that waits for Ready could take the state before its change for the answer.
        """
        live = await self.patch(INFERENCE_SERVICE, name, {"spec": spec})
        version = int(live["metadata"]["resourceVersion"])

        def seen() -> bool:
            known = self.fis(name)
            return known is not None and int(known["metadata"]["resourceVersion"]) >= version

        await self.until(f"{name} seen in version {version}", seen)
        return live

    async def delete(self, resource: Resource, name: str) -> None:
        """Deletes an object; its dependents go in the background."""
        await self.client.request(
            "DELETE",
            resource.path(self.namespace, name),
            body={"propagationPolicy": "Background"},
            timeout_s=30,
        )

    async def events_of(self, name: str = "chat") -> list[Live]:
        """The Kubernetes events about a service."""
        selector = f"involvedObject.kind=InferenceService,involvedObject.name={name}"
        found = await self.client.request(
            "GET", EVENT.path(self.namespace), params={"fieldSelector": selector}
        )
        return list(found["items"])

    async def told(self, name: str, kind: str, words: str = "") -> list[Live]:
        """Wait for an event of this type about a service whose message contains these words.

        Events come after what is more urgent.

        Raises:
            TimeoutError: there was none in time.
        """
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = [
                    event
                    for event in await self.events_of(name)
                    if event["type"] == kind and words in event["message"]
                ]
                if found:
                    return found
                await asyncio.sleep(0.2)

    # -- inside -----------------------------------------------------------------------------------

    async def mirror(self, resource: Resource, synced: asyncio.Event) -> None:
        """Keeps `objects` up with one resource, for ever."""
        while True:
            with suppress(ApiError, ValueError):  # an object too large for the client comes cut
                await self._mirror_once(resource, synced)
            await asyncio.sleep(0.2)

    async def _mirror_once(self, resource: Resource, synced: asyncio.Event) -> None:
        listed = await self.client.request("GET", resource.path(self.namespace), timeout_s=30)
        for key in [key for key in self.objects if key[0] == resource.kind]:
            del self.objects[key]
        for item in listed["items"]:
            self.objects[resource.kind, item["metadata"]["name"]] = item
        synced.set()
        self._changed.set()
        async with self.client.watch(
            resource,
            self.namespace,
            resource_version=listed["metadata"]["resourceVersion"],
            server_timeout_s=600,
        ) as lines:
            async for line in lines:
                event = json.loads(line)
                live = event["object"]
                if event["type"] == "ERROR":
                    return
                if event["type"] == "DELETED":
                    self.objects.pop((resource.kind, live["metadata"]["name"]), None)
                elif event["type"] != "BOOKMARK":
                    self.objects[resource.kind, live["metadata"]["name"]] = live
                self._changed.set()


@asynccontextmanager
async def operator_world(plane: ControlPlane, prefix: str) -> AsyncIterator[World]:
    """A fresh namespace with the CRD, fake GPUs and an operator user; everything ends with it."""
    namespace = f"{prefix}-{secrets.token_hex(3)}"
    _prepare(plane, namespace)
    client = KubernetesClient(await load_configuration(plane.kubeconfig), in_flight=32)
    world = World(plane, namespace, client)
    synced = [asyncio.Event() for _ in SEEN]
    mirrors = [
        asyncio.create_task(world.mirror(resource, event))
        for resource, event in zip(SEEN, synced, strict=True)
    ]
    try:
        for event in synced:
            await event.wait()
        yield world
    finally:
        for process in world.processes:
            process.kill()
        for mirror in mirrors:
            mirror.cancel()
        await asyncio.gather(*mirrors, return_exceptions=True)
        await client.close()
        plane.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--wait=false")


def _prepare(plane: ControlPlane, namespace: str) -> None:
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    nodes = json.loads(plane.kubectl("get", "nodes", "-l", "type=kwok", "-o", "json"))["items"]
    if len(nodes) < NODES:
        plane.add_nodes(NODES - len(nodes), gpus=8)
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "fleetkeeper-test-operator"},
        "rules": operator_rules(),
    }
    router = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "fleetkeeper-router"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
    }
    for manifest in (role, router):
        plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(manifest))
    _grant(plane, namespace, f"operator-{namespace}")


def _grant(plane: ControlPlane, namespace: str, user: str) -> None:
    """Create the namespace and give the operator's user its rights there."""
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "test-operator", "namespace": namespace},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "fleetkeeper-test-operator",
        },
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    for manifest in (space, binding):
        plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(manifest))


NODES = 8
"""Fake nodes with 8 GPUs each."""
