"""The contents of a support bundle: what is read, and under which path it is kept."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from fleetkeeper.api import names
from fleetkeeper.commands.bundle.archive import Archive
from fleetkeeper.commands.bundle.reader import Reader, ReadError
from fleetkeeper.fleet.explanation import explained
from fleetkeeper.fleet.source import METRICS_PORT, OPERATOR_SELECTOR
from fleetkeeper.fleet.view import Gauges, ServiceKey, parse_gauges, view_of

Objects = list[dict[str, Any]]

CHILDREN: Final = {
    "deployments": "apis/apps/v1",
    "replicasets": "apis/apps/v1",
    "pods": "api/v1",
    "services": "api/v1",
    "poddisruptionbudgets": "apis/policy/v1",
    "networkpolicies": "apis/networking.k8s.io/v1",
    "jobs": "apis/batch/v1",
    "configmaps": "api/v1",
}
OPERATOR_OBJECTS: Final = ("deployments", "replicasets", "pods", "services", "configmaps")
SERVICES: Final = f"{names.GROUP}/{names.VERSION}"
LOG_LINES: Final = 2000
LOG_BYTES: Final = 2 * 1024 * 1024
"""The bound of what is read of a log. The archive keeps less, after the redaction."""
METRICS_BYTES: Final = 4 * 1024 * 1024
SETTINGS_KEY: Final = "settings.yaml"


@dataclass
class Collector:
    """The reader that puts the parts into the archive. `progress` gets a line for each part."""

    reader: Reader
    archive: Archive
    operator_namespace: str
    progress: Callable[[str], None]
    gauges: dict[ServiceKey, Gauges] = field(default_factory=dict)
    logs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """The paths of pods, with the pods. Their logs come last, when all objects are kept."""

    def collect(self, namespace: str | None, name: str | None) -> None:
        """Read everything. What cannot be read is in the index of the archive."""
        self.progress("versions, CRD and nodes")
        with self._contained("cluster"):
            self._cluster()
        self.progress(f"operator in namespace {self.operator_namespace}")
        with self._contained("operator"):
            self._operator()
        for where, service, found in list(self._services(namespace, name)):
            self.progress(f"service {where}/{service}")
            with self._contained(f"services/{where}/{service}"):
                self._service(where, service, found)
        for path, pod in self.logs:
            about = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            self.progress(f"logs of pod {about}")
            with self._contained(f"{path}: logs of pod {about}"):
                self._pod_logs(path, pod)

    @contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        """Record an error in one part: the others still belong into the bundle."""
        try:
            yield
        except Exception as problem:  # noqa: BLE001 - no list of types foresees what tenants write
            self.archive.note_missing(what, f"{type(problem).__name__}: {str(problem)[:500]}")

    def _keep(self, what: str, value: Any) -> None:  # noqa: ANN401 - any JSON
        with self._contained(what):
            self.archive.add_object(what, value)

    def _get(self, what: str, path: str) -> dict[str, Any] | None:
        try:
            return self.reader.get(path)
        except ReadError as problem:
            self.archive.note_missing(what, str(problem))
            return None

    def _list(self, what: str, path: str, **query: str) -> Objects:
        try:
            found, is_cut = self.reader.list(path, **query)
        except ReadError as problem:
            self.archive.note_missing(what, str(problem))
            return []
        if is_cut:
            self.archive.note_cut(what, f"only the first {len(found)} objects")
        return found

    def _cluster(self) -> None:
        version = self._get("cluster/version.json", "/version")
        if version is not None:
            self.archive.add_object("cluster/version.json", version)
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.CRD_NAME}"
        crd = self._get("cluster/crd.json", path)
        if crd is not None:
            self.archive.add_object("cluster/crd.json", crd_summary(crd))
        nodes = self._list("cluster/nodes.json", "/api/v1/nodes")
        if nodes:
            self.archive.add_object("cluster/nodes.json", [node_summary(node) for node in nodes])

    def _operator(self) -> None:
        found = self._objects(
            "operator", OPERATOR_OBJECTS, self.operator_namespace, OPERATOR_SELECTOR
        )
        self._events("operator", self.operator_namespace, found)
        for pod in found["pods"]:
            self._metrics(pod["metadata"]["name"])

    def _metrics(self, pod: str) -> None:
        what = f"operator/metrics/{pod}.txt"
        path = (
            f"/api/v1/namespaces/{self.operator_namespace}/pods/{pod}:{METRICS_PORT}/proxy/metrics"
        )
        try:
            content, is_cut = self.reader.content(path, METRICS_BYTES)
            text = content.decode(errors="replace")
            if is_cut:
                self.archive.note_cut(what, f"only the first {METRICS_BYTES} bytes")
                text = text.rpartition("\n")[0] + "\n"
            self.archive.add_text(what, text, METRICS_BYTES)
            # Only the leader has gauges of services.
            self.gauges.update(parse_gauges(text))
        except (ReadError, ValueError) as problem:
            self.archive.note_missing(what, str(problem))

    def _services(
        self, namespace: str | None, name: str | None
    ) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
        """Yield namespace, name and object. A service that cannot be read still has children."""
        if name is not None:
            where = namespace or "default"
            what = f"services/{where}/{name}/inferenceservice.json"
            path = f"/apis/{SERVICES}/namespaces/{where}/{names.PLURAL}/{name}"
            yield where, name, self._get(what, path)
            return
        prefix = f"/apis/{SERVICES}" + (f"/namespaces/{namespace}" if namespace else "")
        what = f"services/{namespace}" if namespace else "services"
        for item in self._list(what, f"{prefix}/{names.PLURAL}"):
            yield item["metadata"]["namespace"], item["metadata"]["name"], item

    def _service(self, namespace: str, name: str, service: dict[str, Any] | None) -> None:
        folder = f"services/{namespace}/{name}"
        if service is not None:
            self._keep(f"{folder}/inferenceservice.json", service)
            with self._contained(f"{folder}/explain.txt"):
                view = view_of(service, self.gauges.get((namespace, name), {}))
                self.archive.add_text(f"{folder}/explain.txt", explained(view, time.time()))
        selector = f"{names.LABEL_SERVICE}={name},{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
        found = self._objects(folder, tuple(CHILDREN), namespace, selector)
        self._events(folder, namespace, found, {name})

    def _objects(
        self, folder: str, plurals: tuple[str, ...], namespace: str, selector: str
    ) -> dict[str, Objects]:
        """Add the objects with these labels, and return them by plural name."""
        all_found: dict[str, Objects] = {}
        for plural in plurals:
            what = f"{folder}/{plural}.json"
            path = f"/{CHILDREN[plural]}/namespaces/{namespace}/{plural}"
            found = self._list(what, path, labelSelector=selector)
            if folder == "operator" and plural == "configmaps":
                found = [item for item in found if SETTINGS_KEY in (item.get("data") or {})]
            if found:
                self._keep(what, found)
            all_found[plural] = found
        self.logs += [(folder, pod) for pod in all_found["pods"]]
        return all_found

    def _events(
        self,
        folder: str,
        namespace: str,
        objects: Mapping[str, Objects],
        others: Iterable[str] = (),
    ) -> None:
        """Add the events of these objects, and of pods of their ReplicaSets that are gone."""
        what = f"{folder}/events.json"
        known = {item["metadata"]["name"] for found in objects.values() for item in found}
        gone = tuple(f"{item['metadata']['name']}-" for item in objects["replicasets"])
        found = []
        for event in self._list(what, f"/api/v1/namespaces/{namespace}/events"):
            about = event.get("involvedObject") or {}
            name = str(about.get("name"))
            is_of_operator = folder == "operator" and about.get("kind") == "Lease"
            if name in known or name in others or name.startswith(gone) or is_of_operator:
                found.append(event)
        if found:
            self._keep(what, found)

    def _pod_logs(self, folder: str, pod: Mapping[str, Any]) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        for container, previous in log_sources(pod):
            what = f"{folder}/logs/{name}/{container}{'.previous' if previous else ''}.log"
            if self.archive.is_full:
                self.archive.note_cut(what, "left out: the bundle has reached its bound")
                continue
            query = {"previous": "true"} if previous else {}
            try:
                content, is_cut = self.reader.content(
                    f"/api/v1/namespaces/{namespace}/pods/{name}/log",
                    LOG_BYTES,
                    container=container,
                    tailLines=LOG_LINES,
                    timestamps="true",
                    **query,
                )
            except ReadError as problem:
                self.archive.note_missing(what, str(problem))
                continue
            text = content.decode(errors="replace")
            if is_cut:
                self.archive.note_cut(what, f"ends after {LOG_BYTES} bytes of {LOG_LINES} lines")
                text = text.rpartition("\n")[0] + "\n"
            self.archive.add_text(what, text)


def log_sources(pod: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the containers of a pod that started, each followed by its previous one if there is one."""
    status = pod.get("status") or {}
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            state = container.get("state") or {}
            if "running" in state or "terminated" in state or container.get("lastState"):
                yield container["name"], False
            if container.get("restartCount"):
                yield container["name"], True


def crd_summary(crd: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of a CRD, each with the hash of its schema, and the conditions."""
    return {
        "versions": [
            {
                "name": version["name"],
                "served": version.get("served"),
                "storage": version.get("storage"),
                "schema": "sha256:" + _digest(version.get("schema")),
            }
            for version in crd["spec"]["versions"]
        ],
        "labels": crd["metadata"].get("labels"),
        "storedVersions": (crd.get("status") or {}).get("storedVersions"),
        "conditions": (crd.get("status") or {}).get("conditions"),
    }


def _digest(value: Any) -> str:  # noqa: ANN401 - any JSON
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def node_summary(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return what places replicas: allocatable resources, taints, versions and conditions."""
    status, spec = node.get("status") or {}, node.get("spec") or {}
    info = status.get("nodeInfo") or {}
    return {
        "name": node["metadata"]["name"],
        "allocatable": status.get("allocatable"),
        "taints": spec.get("taints"),
        "unschedulable": spec.get("unschedulable", False),
        "versions": {
            key: info.get(key)
            for key in ("kubeletVersion", "kernelVersion", "osImage", "containerRuntimeVersion")
        },
        "conditions": {row["type"]: row["status"] for row in status.get("conditions") or ()},
    }
