"""Whether another release of Fleetkeeper serves the same namespaces.

Two releases with different leases would both write to the same services. What gives a release its
rights also shows it to the others: a namespaced release is a labelled RoleBinding in each namespace
that it serves, a cluster-wide one a ConfigMap in kube-public that every service account may read. The
chart makes both, and they go with the release. The older release of two keeps its namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from fleetkeeper.adapters.kubernetes.client import KubernetesClient
from fleetkeeper.adapters.kubernetes.errors import ApiError
from fleetkeeper.adapters.kubernetes.resources import CHILDREN
from fleetkeeper.plan.model import Kind

log = structlog.get_logger(__name__)

ANNOTATION_RELEASE: Final = "fleetkeeper.io/release"
"""NAMESPACE/NAME of a release, on the objects that show it."""
OPERATOR_SELECTOR: Final = "fleetkeeper.io/component=operator"
MARKER_NAMESPACE: Final = "kube-public"
MARKER_NAME: Final = "fleetkeeper-release"
NOT_YET: Final = "9999"
"""Later than every timestamp: a release without a marker of its own yields to any other."""


class NamespacesTaken(Exception):
    """Other releases serve namespaces that this one shall serve; `by_namespace` says which.

    The key "" stands for the whole cluster.
    """

    def __init__(self, by_namespace: Mapping[str, str]) -> None:
        self.by_namespace = dict(by_namespace)
        where = [
            f"{f'namespace {namespace}' if namespace else 'the cluster'} is served by {release}"
            for namespace, release in sorted(self.by_namespace.items())
        ]
        super().__init__(
            f"another release was here first: {'; '.join(where)}. "
            "Uninstall one of them, or give each its own `namespaces`, and restart this operator."
        )


@dataclass(frozen=True, slots=True)
class Marker:
    """One release in one place. `namespace` is "" for a release that serves the whole cluster."""

    release: str
    since: str
    namespace: str = ""

    @property
    def age(self) -> tuple[str, str]:
        """Orders markers of one place, the oldest first."""
        return self.since, self.release


async def refuse_taken(client: KubernetesClient, own: str, namespaces: tuple[str, ...]) -> None:
    """Returns when no older release serves what the release `own` (NAMESPACE/NAME) shall serve.

    Raises:
        NamespacesTaken: one does.
        ApiError: the API server could not be asked.
    """
    cluster = await _cluster_marker(client)
    found = [
        marker
        for namespace in namespaces or (None,)
        for marker in await _markers(client, namespace)
    ]
    if namespaces:
        taken = _taken_namespaces(own, namespaces, [*found, *cluster])
    else:
        taken = _taken_cluster(own, found, cluster)
    if taken:
        raise NamespacesTaken(taken)


def _taken_namespaces(
    own: str, namespaces: Iterable[str], markers: Iterable[Marker]
) -> dict[str, str]:
    """Of a namespaced release: each namespace whose oldest marker is another's."""
    taken = {}
    for namespace in namespaces:
        here = [marker for marker in markers if marker.namespace in {namespace, ""}]
        if (older := _older(own, here)) is not None:
            taken[namespace] = _in_words(older)
    return taken


def _taken_cluster(own: str, found: Iterable[Marker], cluster: list[Marker]) -> dict[str, str]:
    """Of a cluster-wide release: any older one, wherever it is.

    A younger namespaced one refuses by itself; a marker that a tenant forged is one of those.
    """
    taken = {marker.namespace: _in_words(marker) for marker in cluster if marker.release != own}
    for marker in found:
        older = _older(own, [marker, *(item for item in cluster if item.release == own)])
        if older is not None:
            taken[marker.namespace] = _in_words(older)
        elif marker.release != own:
            log.error(
                "a younger release serves a namespace too",
                namespace=marker.namespace,
                release=marker.release,
            )
    return taken


def _older(own: str, markers: Iterable[Marker]) -> Marker | None:
    """The oldest marker of another release, unless this release's own is older."""
    mine = min((item.age for item in markers if item.release == own), default=(NOT_YET, own))
    others = [item for item in markers if item.release != own and item.age < mine]
    return min(others, key=lambda item: item.age, default=None)


def _in_words(marker: Marker) -> str:
    kind = "namespaced" if marker.namespace else "cluster-wide"
    return f"the {kind} release {marker.release} (since {marker.since})"


async def _cluster_marker(client: KubernetesClient) -> list[Marker]:
    """The cluster-wide release, if there is one: without it nobody may read its marker."""
    try:
        live = await client.read(CHILDREN[Kind.CONFIG_MAP], MARKER_NAMESPACE, MARKER_NAME)
    except ApiError as problem:
        if problem.status == 403:
            return []
        raise
    return _parsed([live] if live else [], "")


async def _markers(client: KubernetesClient, namespace: str | None) -> list[Marker]:
    """The namespaced releases; none where the RoleBindings of a namespace cannot be read."""
    found: list[Marker] = []
    try:
        async for page in client.list_pages(
            CHILDREN[Kind.ROLE_BINDING], namespace, selector=OPERATOR_SELECTOR
        ):
            found += _parsed(page["items"], namespace)
    except ApiError as problem:
        if namespace is None or problem.status not in {403, 404}:
            raise
        log.warning("other releases cannot be seen", namespace=namespace, error=str(problem))
    return found


def _parsed(items: Iterable[Mapping[str, Any]], namespace: str | None) -> list[Marker]:
    markers = []
    for item in items:
        meta = item["metadata"]
        release = (meta.get("annotations") or {}).get(ANNOTATION_RELEASE)
        if release:
            place = str(meta.get("namespace") or "") if namespace is None else namespace
            markers.append(Marker(str(release), str(meta["creationTimestamp"]), place))
    return markers
