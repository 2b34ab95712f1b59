"""An API server's lists and watches over plain HTTP, for gateways that run as processes of their own.

It has InferenceServices, Secrets and ConfigMaps, whose data can be patched. Everything else is a 404.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web

from fleetkeeper_contract import client_keys
from fleetkeeper_local.control_plane.ports import free_ports

SERVICES: Final = "inferenceservices"
SECRETS: Final = "secrets"
CONFIG_MAPS: Final = "configmaps"
KINDS: Final = {
    SERVICES: ("fleetkeeper.io/v1alpha1", "InferenceService"),
    SECRETS: ("v1", "Secret"),
    CONFIG_MAPS: ("v1", "ConfigMap"),
}
KEYS_NAMESPACE: Final = "fleetkeeper-keys"
BOOKMARK_S: Final = 10.0

Manifest = dict[str, Any]


def service(
    namespace: str, name: str, models: Iterable[str] = (), *, access: str = "Gateway"
) -> Manifest:
    """Return an InferenceService that is ready; the first model is its served name."""
    first, *adapters = list(models) or [name]
    return {
        "apiVersion": "fleetkeeper.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": uid_of(namespace, name),
            "generation": 1,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "access": access,
            "model": {
                "source": "pvc://models/tiny",
                "servedName": first,
                "adapters": [{"name": item, "source": "pvc://models/a"} for item in adapters],
            },
        },
        "status": {
            "observedGeneration": 1,
            "replicas": 1,
            "readyReplicas": 1,
            "availableReplicas": 1,
            "url": f"http://{name}.{namespace}.svc:80/v1",
            "conditions": [
                {
                    "type": kind,
                    "status": "True",
                    "reason": reason,
                    "message": "",
                    "observedGeneration": 1,
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
                for kind, reason in (("Ready", "AllReplicasReady"), ("Available", "Available"))
            ],
        },
    }


def config_map(namespace: str, name: str, data: Mapping[str, str] | None = None) -> Manifest:
    """Return a ConfigMap; None: without data, as the chart renders it."""
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": namespace, "name": name, "uid": uid_of(namespace, name)},
    }
    return manifest if data is None else {**manifest, "data": dict(data)}


def key_secret(name: str, key: str, **entries: str) -> Manifest:
    """Return the Secret of a client's key; entries are those of `fleetkeeper_contract.client_keys`."""
    data = {
        client_keys.DIGEST: hashlib.sha256(key.encode()).hexdigest(),
        client_keys.NAME: name,
        **entries,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": client_keys.KEY_SECRET_TYPE,
        "metadata": {
            "namespace": KEYS_NAMESPACE,
            "name": name,
            "uid": uid_of(KEYS_NAMESPACE, name),
            "labels": {client_keys.KEY_LABEL: "true"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "data": {entry: base64.b64encode(value.encode()).decode() for entry, value in data.items()},
    }


def uid_of(namespace: str, name: str) -> str:
    """Return a UID that depends on the name alone."""
    text = hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:32]}"


class ApiStandIn:
    """Objects, their lists and their watches. It can go away and come back at the same address."""

    def __init__(self) -> None:
        self._port = free_ports(1)[0]
        self._runner: web.AppRunner | None = None
        self._version = 100
        self._objects: dict[str, dict[str, Manifest]] = {kind: {} for kind in KINDS}
        self._pages: dict[str, tuple[int, list[Manifest] | None]] = {}
        """What is left of lists that are being read, by the value of `continue`."""
        self._watches: dict[asyncio.Queue[bytes | None], tuple[str, str | None, str]] = {}
        self.patches: list[tuple[str, dict[str, str | None]]] = []
        """The token and the data of each patch that came."""
        self.patch_status = 200
        """Status that answers the next patches; they change nothing unless it is 200."""

    async def __aenter__(self) -> Self:
        """Listen."""
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Go away."""
        await self.stop()

    async def start(self) -> None:
        """Listen at the same address as before."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def stop(self) -> None:
        """End every watch and refuse connections."""
        for queue in self._watches:
            queue.put_nowait(None)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def watching(self) -> set[str]:
        """Return the plurals that are being watched."""
        return {plural for plural, _, _ in self._watches.values()}

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self._port}"

    def data(self, namespace: str, name: str) -> dict[str, str]:
        """Return the data of a ConfigMap."""
        return dict(self._objects[CONFIG_MAPS][f"{namespace}/{name}"].get("data") or {})

    def write_kubeconfig(self, file: Path) -> Path:
        """Write how to reach it."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "contexts": [{"name": "stand-in", "context": {"cluster": "it", "user": "gateway"}}],
            "clusters": [
                {"name": "it", "cluster": {"server": self.url}},
            ],
            "users": [{"name": "gateway", "user": {"token": "of-the-stand-in"}}],
        }
        file.write_text(json.dumps(config))
        return file

    def put(self, *manifests: Manifest) -> None:
        """Create or replace objects."""
        for manifest in manifests:
            plural = next(name for name, (_, kind) in KINDS.items() if kind == manifest["kind"])
            held = self._objects[plural]
            path = _path_of(manifest)
            self._version += 1
            stored = {
                **manifest,
                "metadata": {**manifest["metadata"], "resourceVersion": str(self._version)},
            }
            event = "MODIFIED" if path in held else "ADDED"
            held[path] = stored
            self._tell(plural, event, stored)

    def delete(self, plural: str, namespace: str, name: str) -> None:
        """Delete an object."""
        self._version += 1
        gone = self._objects[plural].pop(f"{namespace}/{name}")
        gone["metadata"]["resourceVersion"] = str(self._version)
        self._tell(plural, "DELETED", gone)

    def _tell(self, plural: str, event: str, manifest: Manifest) -> None:
        line = json.dumps({"type": event, "object": manifest}).encode() + b"\n"
        for queue, (watched, namespace, selector) in self._watches.items():
            if watched == plural and _matches(manifest, namespace, selector):
                queue.put_nowait(line)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        *_, plural = request.path.rstrip("/").split("/")
        if request.method == "PATCH":
            return await self._patch(request)
        if request.method != "GET" or plural not in KINDS:
            return web.json_response(_failure(404, "NotFound"), status=404)
        parts = request.path.split("/")
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else None
        selector = request.query.get("labelSelector", "") or request.query.get("fieldSelector", "")
        if request.query.get("watch") in {"true", "1", "True"}:
            return await self._watch(request, plural, namespace, selector)
        return self._page(request, plural, namespace, selector)

    async def _patch(self, request: web.Request) -> web.Response:
        """Merge data into a ConfigMap."""
        assert request.headers["Content-Type"] == "application/merge-patch+json"
        *_, namespace, plural, name = request.path.split("/")
        patch = (await request.json())["data"]
        self.patches.append((request.headers.get("Authorization", ""), patch))
        found = self._objects[CONFIG_MAPS].get(f"{namespace}/{name}")
        status = self.patch_status if found is not None and plural == CONFIG_MAPS else 404
        if status != 200 or found is None:
            return web.json_response(_failure(status, f"Failed{status}"), status=status)
        data = {**(found.get("data") or {}), **patch}
        data = {key: value for key, value in data.items() if value is not None}
        self.put({**found, "data": data})
        return web.json_response(found)

    def _page(
        self, request: web.Request, plural: str, namespace: str | None, selector: str
    ) -> web.Response:
        """Return a page of a list. The pages after the first one are of the same point in time."""
        version, items = self._pages.pop(request.query.get("continue", ""), (self._version, None))
        if items is None:
            found = self._objects[plural].values()
            items = [item for item in found if _matches(item, namespace, selector)]
        count = int(request.query.get("limit") or len(items))
        metadata = {"resourceVersion": str(version)}
        if rest := items[count:]:
            metadata["continue"] = secrets.token_hex(8)
            self._pages[metadata["continue"]] = (version, rest)
        api_version, kind = KINDS[plural]
        return web.json_response(
            {
                "apiVersion": api_version,
                "kind": f"{kind}List",
                "metadata": metadata,
                "items": items[:count],
            }
        )

    async def _watch(
        self, request: web.Request, plural: str, namespace: str | None, selector: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        since = int(request.query.get("resourceVersion") or 0)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for item in self._objects[plural].values():
            if int(item["metadata"]["resourceVersion"]) > since and _matches(
                item, namespace, selector
            ):
                queue.put_nowait(json.dumps({"type": "ADDED", "object": item}).encode() + b"\n")
        self._watches[queue] = (plural, namespace, selector)
        try:
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                while (line := await self._next(queue, plural)) is not None:
                    await response.write(line)
        finally:
            del self._watches[queue]
        return response

    async def _next(self, queue: asyncio.Queue[bytes | None], plural: str) -> bytes | None:
        """Return the next line of a watch: an event, or a bookmark if there is none for a time."""
        try:
            async with asyncio.timeout(BOOKMARK_S):
                return await queue.get()
        except TimeoutError:
            version, kind = KINDS[plural]
            metadata = {"resourceVersion": str(self._version)}
            bookmark = {"apiVersion": version, "kind": kind, "metadata": metadata}
            return json.dumps({"type": "BOOKMARK", "object": bookmark}).encode() + b"\n"


def _path_of(manifest: Mapping[str, Any]) -> str:
    metadata = manifest["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}"


def _matches(manifest: Mapping[str, Any], namespace: str | None, selector: str) -> bool:
    """Return whether an object is in a namespace and has the labels, or the name, of a selector of equalities."""
    metadata = manifest["metadata"]
    if namespace is not None and metadata["namespace"] != namespace:
        return False
    labels = {**(metadata.get("labels") or {}), "metadata.name": metadata["name"]}
    wanted = [part.split("=") for part in selector.replace("==", "=").split(",") if part]
    return all(labels.get(name) == value for name, value in wanted)


def _failure(code: int, reason: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": reason,
    }
