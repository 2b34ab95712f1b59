"""Every write to the Kubernetes API. There is no other: all pass the fence and the hook.

The fence is asked just before a request is sent, each time: a process that no longer leads sends
nothing, also when it was stopped between a decision and its write. The hook sees each write at three
points; it counts, and it is where a test kills the process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlencode

from fleetkeeper.adapters.kubernetes.client import (
    REQUEST_TIMEOUT_S,
    Checkpoint,
    KubernetesClient,
)
from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.resources import (
    CHILDREN,
    EVENT,
    INFERENCE_SERVICE,
    POD,
    Resource,
)
from fleetkeeper.api.names import ANNOTATION_DELETION_COST, FIELD_MANAGER
from fleetkeeper.plan.model import Kind, Manifest

APPLY: Final = "application/apply-patch+yaml"
NO_VERSION: Final = "1"
"""A resourceVersion that no object has: the first write of a cluster has a greater one."""
ADDRESSES_IN_FLIGHT: Final = 6
"""New Services at a time: the API server allots their addresses one after another, and more of them
would wait there until their time is out."""


class WritePoint(StrEnum):
    """The moments of a write between which a crash makes a difference."""

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
    """Looks at nothing."""


class KubernetesWriter:
    """Writes under one field manager.

    Every method raises ApiError when the server did not take the write, and what the fence raises
    when this process may not write.
    """

    def __init__(
        self, client: KubernetesClient, *, fence: Checkpoint, hook: WriteHook = no_hook
    ) -> None:
        self._client = client
        self._fence = fence
        self._hook = hook
        self._addresses = asyncio.Semaphore(ADDRESSES_IN_FLIGHT)
        self._under_way: dict[object, float] = {}
        """Until when each write that was sent and not answered may be applied."""
        self._uncertain_until = 0.0
        """The same of writes that nobody waits for any more: cancelled, or without an answer."""

    async def settled(self) -> None:
        """Wait until no write that was sent can be applied any more.

        A write is taken within `REQUEST_TIMEOUT_S` of being sent, or never; to close its connection
        does not take it back.
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
        """Server-side apply of a child; the live object as the server has it now.

        With `resource_version` the server answers 409 when the object moved on since.
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
        """Server-side apply of a child that is not there yet; the live object.

        Whatever has that name already, ours or not, is answered 409 and stays as it is: it never has
        the version that is asked for, while an absent object has none to compare. One request, and no
        moment between a look and a write.
        """
        turn = self._addresses if resource == CHILDREN[Kind.SERVICE] else contextlib.nullcontext()
        async with turn:
            return await self.apply_child(
                resource, manifest, force=False, resource_version=NO_VERSION
            )

    async def apply_status(
        self, namespace: str, name: str, uid: str, status: Manifest
    ) -> dict[str, Any]:
        """Server-side apply of the whole status of that very InferenceService, and of it alone.

        A service that was deleted, or made anew under the same name, is answered 404 or 409.
        """
        body = {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.kind,
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "status": status,
        }
        return await self._apply(
            INFERENCE_SERVICE, namespace, name, body, force=True, subresource="status"
        )

    async def mark_pod(
        self, namespace: str, name: str, uid: str, deletion_cost: int
    ) -> dict[str, Any]:
        """Sets the deletion cost of that very pod."""
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
        """Deletes that very object as it was seen; False when it was gone already.

        Its dependents go in the background, as Kubernetes' garbage collector finds them.
        """
        options: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid, "resourceVersion": resource_version},
        }
        try:
            write = Write("delete", resource.kind, namespace, name)
            await self._request(
                "DELETE", resource.path(namespace, name), write, options, "application/json"
            )
        except ApiError as problem:
            if problem.is_absent:
                return False
            raise
        return True

    async def post_event(self, namespace: str, manifest: Manifest) -> None:
        """Posts an event. The same one twice is one: its name is the caller's."""
        write = Write("create", EVENT.kind, namespace, manifest["metadata"]["name"])
        try:
            await self._request("POST", EVENT.path(namespace), write, manifest, "application/json")
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
        query = urlencode({"fieldManager": FIELD_MANAGER, "force": str(force).lower()})
        path = f"{resource.path(namespace, name, subresource)}?{query}"
        kind = f"{resource.kind}/{subresource}" if subresource else resource.kind
        return await self._request(
            "PATCH", path, Write("apply", kind, namespace, name), body, APPLY
        )

    async def _request(
        self, method: str, path: str, write: Write, body: Mapping[str, Any], content_type: str
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
