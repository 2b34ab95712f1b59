"""A namespace on a real API server with an operator process in it, and ways to wait for events.

The tests see the cluster through a list and a watch of their own, with the administrator's rights.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fleetkeeper.adapters.kubernetes.credentials import load_credentials
from fleetkeeper.adapters.kubernetes.resources import (
    CHILDREN,
    EVENT,
    INFERENCE_SERVICE,
    POD,
    REPLICA_SET,
)
from fleetkeeper.api.names import LABEL_SERVICE
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.resource import Resource
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_process import PATIENCE_S, OperatorProcess
from tests.support.operators.operator_rights import grant_rights, prepare_namespace
from tests.support.plane.audit_log import WRITE_VERBS, Request, audited_requests
from tests.support.plane.cluster_mirror import ClusterMirror
from tests.support.plane.patient_client import PatientClient
from tests.support.plane.plane_state import mend, state_of

SETTLE_S = 20.0
"""The time for which the last news of a change may wait: a rollout, 5 s until its pods are available, 10 s in the
queue."""
SEEN: tuple[Resource, ...] = (INFERENCE_SERVICE, *CHILDREN.values(), REPLICA_SET, POD)
MARKER_PATH = "/api/v1/namespaces/kube-public/configmaps/fleetkeeper-release"
"""The object in which the operator finds a cluster-wide release."""
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
Live = dict[str, Any]


def service(name: str = "chat", **spec: Any) -> Live:
    """Return an InferenceService that fits the fake nodes; `spec` replaces whole sections."""
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
    """Return a condition of an object, {} if it has none."""
    found = ((live or {}).get("status") or {}).get("conditions") or []
    return next((item for item in found if item["type"] == kind), {})


def is_ready(live: Live | None) -> bool:
    """Return True if the service is Ready in its current generation."""
    ready = condition(live, "Ready")
    return bool(
        live is not None
        and ready.get("status") == "True"
        and ready.get("observedGeneration") == live["metadata"]["generation"]
        and live["status"].get("observedGeneration") == live["metadata"]["generation"]
    )


def _is_at_rest(live: Live) -> bool:
    status = live.get("status") or {}
    return (
        condition(live, "Progressing").get("reason") != "RollingOut"
        and status.get("availableReplicas") == status.get("readyReplicas")
        and all(state["stage"] != "Draining" for state in status.get("replicaStates", ()))
    )


class World:
    """One namespace: its present objects, and the operator's requests to the API server."""

    def __init__(self, plane: ControlPlane, namespace: str, client: PatientClient) -> None:
        self.plane = plane
        self.namespace = namespace
        self.client = client
        self.directory = Path(tempfile.mkdtemp(prefix=f"{namespace}-"))
        self.user = f"operator-{namespace}"
        self.operator_kubeconfig = plane.user_kubeconfig(self.user)
        self.mirror = ClusterMirror(client, namespace)
        self.objects = self.mirror.objects
        self.processes: list[OperatorProcess] = []

    def operator(self, name: str = "a", **options: Any) -> OperatorProcess:
        """Return a process of the operator that is not started yet."""
        process = OperatorProcess(self, name=name, **options)
        self.processes.append(process)
        return process

    # -- seeing -----------------------------------------------------------------------------------

    def get(self, kind: str, name: str) -> Live | None:
        """Return the present state of an object."""
        return self.objects.get((kind, name))

    def fis(self, name: str = "chat") -> Live | None:
        """Return the present state of an InferenceService."""
        return self.get(INFERENCE_SERVICE.kind, name)

    def children(self, name: str = "chat") -> dict[tuple[str, str], Live]:
        """Return the children of a service by kind and name."""
        kinds = {kind.value for kind in CHILDREN}
        return {
            key: live
            for key, live in self.objects.items()
            if key[0] in kinds and (live["metadata"].get("labels") or {}).get(LABEL_SERVICE) == name
        }

    async def until(
        self, what: str, holds: Callable[[], object], timeout_s: float = PATIENCE_S
    ) -> None:
        """Wait until `holds()` is true; it is called at every event.

        Raises:
            AssertionError: it did not come true in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    self.mirror.changed.clear()
                    try:
                        await asyncio.wait_for(self.mirror.changed.wait(), 0.2)
                    except TimeoutError:  # what is no event (the end of a process) is seen too
                        mend(self.plane)
        except TimeoutError:
            logs = "\n".join(p.log.read_text()[-3000:] for p in self.processes)
            cluster = await asyncio.to_thread(state_of, self.plane)
            raise AssertionError(f"{what}: not within {timeout_s:g} s\n{logs}\n{cluster}") from None

    async def ready(self, *names: str) -> None:
        """Wait until the services (default: chat) are Ready in their current generation."""
        for name in names or ("chat",):
            await self.until(f"{name} ready", partial(self._is_ready, name))

    def _is_ready(self, name: str) -> bool:
        return is_ready(self.fis(name))

    def mark(self) -> int:
        """Return the present end of the audit log."""
        return self.plane.audit_log.stat().st_size

    def requests(self, since: int = 0) -> list[Request]:
        """Return the operator's requests since a mark, without watches, leases and discovery."""
        return audited_requests(self.plane, self.user, since)

    def writes(self, since: int = 0, *, events: bool = False) -> list[Request]:
        """Return the writes among them, without those of Events unless `events`."""
        return [
            request
            for request in self.requests(since)
            if request.verb in WRITE_VERBS and (events or request.resource != "events")
        ]

    def accepted_writes(self, since: int) -> Counter[str]:
        """Return the number of writes that the API server accepted, by resource.

        A write that carries a resourceVersion is refused with 409 and tried again when the object
        changed in between, which the Deployment controller may do at any time. No other refusal is
        expected. A 504 is none: etcd was late, and the write is tried again.
        """
        writes = self.writes(since)
        unexpected = [
            write for write in writes if write.code >= 300 and write.code not in {409, 504}
        ]
        assert not unexpected, unexpected
        return Counter(write.resource for write in writes if write.code < 300)

    async def quiet(self, seconds: float = 2.0) -> None:
        """Wait until the operator has sent no request for this time, and none is to come.

        A service is Ready in the middle of a rollout, whose next step may take longer than this time. A
        status waits for up to 10 s if its only news is that ready replicas count as available, or that
        drained pods are gone.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        last, seen = began, -1
        mark = self.mark()
        async with asyncio.timeout(PATIENCE_S * 2):
            while loop.time() - last < seconds:
                count = len(self.requests(mark))
                is_due = not self._is_settled() and loop.time() - began < SETTLE_S
                if count != seen or is_due:
                    last, seen = loop.time(), count
                await asyncio.sleep(0.2)

    def _is_settled(self) -> bool:
        """Return True if no rollout goes on, ready replicas count as available, and no pod drains."""
        kind = INFERENCE_SERVICE.kind
        return all(_is_at_rest(live) for (of, _), live in self.objects.items() if of == kind)

    # -- doing ------------------------------------------------------------------------------------

    @contextmanager
    def cluster_rights(self) -> Iterator[None]:
        """Give the operator its rights in every namespace within the block."""
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
        grant_rights(self.plane, namespace, self.user)

    async def create(self, manifest: Live) -> Live:
        """Create an InferenceService."""
        body = {**manifest, "metadata": {**manifest["metadata"], "namespace": self.namespace}}
        path = INFERENCE_SERVICE.path(self.namespace)
        return await self.client.request("POST", path, body=body)

    async def patch(self, resource: Resource, name: str, patch: Mapping[str, Any]) -> Live:
        """Send a merge patch as a person with kubectl."""
        return await self.client.request(
            "PATCH",
            resource.path(self.namespace, name) + "?fieldManager=kubectl-edit",
            body=patch,
            content_type="application/merge-patch+json",
        )

    async def patch_or_create(self, resource: Resource, manifest: Live) -> Live:
        """Send a server-side apply as a person."""
        return await self.client.request(
            "PATCH",
            resource.path(self.namespace, manifest["metadata"]["name"])
            + "?fieldManager=restore&force=true",
            body=manifest,
            content_type="application/apply-patch+yaml",
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
        """Delete an object and, in the background, its dependents."""
        await self.client.request(
            "DELETE",
            resource.path(self.namespace, name),
            body={"propagationPolicy": "Background"},
        )

    async def events_of(self, name: str = "chat") -> list[Live]:
        """Return the Kubernetes events about a service."""
        selector = f"involvedObject.kind=InferenceService,involvedObject.name={name}"
        found = await self.client.request(
            "GET", EVENT.path(self.namespace), params={"fieldSelector": selector}
        )
        return list(found["items"])

    async def wait_for_event(self, name: str, kind: str, words: str = "") -> list[Live]:
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


@asynccontextmanager
async def operator_world(plane: ControlPlane, prefix: str) -> AsyncIterator[World]:
    """Yield a new namespace with the CRD, fake GPUs and an operator user; remove it at the end."""
    namespace = f"{prefix}-{secrets.token_hex(3)}"
    prepare_namespace(plane, namespace)
    credentials = await load_credentials(plane.kubeconfig)
    async with PatientClient(credentials, in_flight=32) as client:
        world = World(plane, namespace, client)
        synced = [asyncio.Event() for _ in SEEN]
        mirrors = [
            asyncio.create_task(world.mirror.keep(resource, event))
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
            try:
                await client.request("DELETE", f"/api/v1/namespaces/{namespace}")
            except ApiError as problem:
                if problem.status not in {404, 409}:  # the test deleted it
                    raise
