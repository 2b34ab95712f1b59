"""All writes to the Kubernetes API except those of the Lease. Each passes the fence and the hook.

The fence is checked just before each sending of a request. So a process that no longer leads sends
nothing, even if it was suspended between a decision and its write. The hook is called at three points
of each write. It counts writes, and tests use it to kill the process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, EVENT, INFERENCE_SERVICE, POD
from fleetkeeper.api.names import ANNOTATION_DELETION_COST, FIELD_MANAGER
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_kube.client import REQUEST_TIMEOUT_S, Checkpoint, KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.resource import Resource

APPLY: Final = "application/apply-patch+yaml"
NO_VERSION: Final = "1"
"""A resourceVersion that no object has: the first write in a cluster has a greater one."""
ADDRESSES_IN_FLIGHT: Final = 6
"""Services created at a time. The API server allocates their cluster IPs one after another, so more
requests would wait there until they time out."""


class WritePoint(StrEnum):
    """The points of a write between which a crash makes a difference."""

    BEFORE = "before"
    APPLIED = "applied"
    ANSWERED = "answered"


@dataclass(frozen=True, slots=True)
class Write:
    """A write as the hook sees it. `kind` is `Deployment`, `InferenceService/status`, ..."""

    verb: str
    kind: str
    namespace: str
    name: str


WriteHook = Callable[[WritePoint, Write], None]


def no_hook(point: WritePoint, write: Write) -> None:
    """Do nothing."""


class KubernetesWriter:
    """A writer under one field manager.

    Every method raises ApiError if the server refused the write, and the fence's error if this
    process must not write.
    """

    def __init__(
        self, client: KubernetesClient, *, fence: Checkpoint, hook: WriteHook = no_hook
    ) -> None:
        self._client = client
        self._fence = fence
        self._hook = hook
        self._addresses = asyncio.Semaphore(ADDRESSES_IN_FLIGHT)
        self._under_way: dict[object, float] = {}
        """Until when each write that was sent but not answered may still be applied."""
        self._uncertain_until = 0.0
        """The same for writes without a waiting caller: cancelled, or without a response."""

    async def settled(self) -> None:
        """Wait until no write that was sent can be applied anymore.

        A write is applied within `REQUEST_TIMEOUT_S` of being sent, or never. Closing its connection
        does not revoke it.
        """
        until = max(self._uncertain_until, *self._under_way.values(), 0.0)
        await asyncio.sleep(until - asyncio.get_running_loop().time())

    async def apply_child(
        self,
        resource: Resource,
        manifest: Manifest,
        *,
        force: bool,
        resource_version: str | None = None,
    ) -> dict[str, Any]:
        """Apply a child server-side; return the live object.

        With `resource_version` the server responds 409 if the object has changed since.
        """
        body = manifest
        if resource_version is not None:
            body = {
                **manifest,
                "metadata": {**manifest["metadata"], "resourceVersion": resource_version},
            }
        meta = manifest["metadata"]
        return await self._apply(resource, meta["namespace"], meta["name"], body, force=force)

    async def create_child(self, resource: Resource, manifest: Manifest) -> dict[str, Any]:
        """Create a child by server-side apply; return the live object.

        If an object has that name already, ours or not, the server responds 409 and the object stays
        as it is: it never has the requested version, and an absent object has none to compare. So it
        is one request, without a gap between a check and a write.
        """
        turn = self._addresses if resource == CHILDREN[Kind.SERVICE] else contextlib.nullcontext()
        async with turn:
            return await self.apply_child(
                resource, manifest, force=False, resource_version=NO_VERSION
            )

    async def apply_status(
        self, namespace: str, name: str, status: Manifest, *, uid: str, resource_version: str
    ) -> dict[str, Any]:
        """Apply the whole status of exactly this InferenceService in this version, server-side.

        The server responds 404 or 409 if the service was changed, deleted or recreated since.
        """
        body = {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.kind,
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": uid,
                "resourceVersion": resource_version,
            },
            "status": status,
        }
        return await self._apply(
            INFERENCE_SERVICE, namespace, name, body, force=True, subresource="status"
        )

    async def mark_pod(
        self, namespace: str, name: str, uid: str, deletion_cost: int
    ) -> dict[str, Any]:
        """Set the deletion cost of exactly the pod with this UID."""
        body = {
            "apiVersion": POD.api_version,
            "kind": POD.kind,
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": uid,
                "annotations": {ANNOTATION_DELETION_COST: str(deletion_cost)},
            },
        }
        return await self._apply(POD, namespace, name, body, force=True)

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, resource_version: str
    ) -> bool:
        """Delete exactly this object in this version; return False if it was already gone.

        Kubernetes' garbage collector deletes its dependents in the background.
        """
        options: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid, "resourceVersion": resource_version},
        }
        try:
            write = Write("delete", resource.kind, namespace, name)
            await self._request("DELETE", resource.path(namespace, name), write, options)
        except ApiError as problem:
            if problem.is_absent:
                return False
            raise
        return True

    async def post_event(self, namespace: str, manifest: Manifest) -> None:
        """Post an event. A repeated post has no effect, because the caller sets the name."""
        await self.create(EVENT, namespace, manifest)

    async def create(self, resource: Resource, namespace: str, manifest: Manifest) -> None:
        """Create an object that no reconcile needs; one that exists stays as it is."""
        write = Write("create", resource.kind, namespace, manifest["metadata"]["name"])
        try:
            await self._request("POST", resource.path(namespace), write, manifest)
        except ApiError as problem:
            if problem.reason != "AlreadyExists":
                raise

    async def _apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Mapping[str, Any],
        *,
        force: bool,
        subresource: str = "",
    ) -> dict[str, Any]:
        kind = f"{resource.kind}/{subresource}" if subresource else resource.kind
        return await self._request(
            "PATCH",
            resource.path(namespace, name, subresource),
            Write("apply", kind, namespace, name),
            body,
            APPLY,
            params={"fieldManager": FIELD_MANAGER, "force": str(force).lower()},
        )

    async def _request(
        self,
        method: str,
        path: str,
        write: Write,
        body: Mapping[str, Any],
        content_type: str = "application/json",
        *,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        turn = object()

        def before() -> None:
            self._fence()
            self._hook(WritePoint.BEFORE, write)
            self._under_way[turn] = asyncio.get_running_loop().time() + REQUEST_TIMEOUT_S

        answered = False
        try:
            answer = await self._client.request(
                method,
                path,
                params=params,
                body=body,
                content_type=content_type,
                before_send=before,
                on_answer=lambda: self._hook(WritePoint.APPLIED, write),
            )
            answered = True
        except ApiError as problem:
            answered = problem.status > 0
            raise
        finally:
            until = self._under_way.pop(turn, 0.0)
            if not answered:
                self._uncertain_until = max(self._uncertain_until, until)
        self._hook(WritePoint.ANSWERED, write)
        return answer
