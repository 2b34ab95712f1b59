"""Detection of another Fleetkeeper release that serves the same namespaces.

Two releases with different leases would both write to the same services. So each release has markers
that the others can read. The marker of a namespaced release is a labeled RoleBinding in each of its
namespaces. That of a cluster-wide release is a ConfigMap in kube-public that every service account may
read. The chart creates them, and they are deleted with the release. Of two releases, the older one
keeps its namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from fleetkeeper.adapters.kubernetes.resources import CHILDREN
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError

log = structlog.get_logger(__name__)

ANNOTATION_RELEASE: Final = "fleetkeeper.io/release"
"""NAMESPACE/NAME of a release, on its markers."""
OPERATOR_SELECTOR: Final = "fleetkeeper.io/component=operator"
MARKER_NAMESPACE: Final = "kube-public"
MARKER_NAME: Final = "fleetkeeper-release"
NOT_YET: Final = "9999"
"""Later than every timestamp: a release without its own marker yields to every other release."""


class NamespacesTaken(Exception):
    """Other releases serve namespaces that this release is configured for.

    `by_namespace` holds the release by namespace; the key "" is the whole cluster.
    """

    def __init__(self, by_namespace: Mapping[str, str]) -> None:
        self.by_namespace = dict(by_namespace)
        where = [
            f"{f'namespace {namespace}' if namespace else 'the cluster'} is served by {release}"
            for namespace, release in sorted(self.by_namespace.items())
        ]
        super().__init__(
            f"an older release is installed: {'; '.join(where)}. "
            "Uninstall one of them, or give each its own `namespaces`. Then restart this operator."
        )


@dataclass(frozen=True, slots=True)
class Marker:
    """A release in one namespace. `namespace` is "" for a release that serves the whole cluster."""

    release: str
    since: str
    namespace: str = ""

    @property
    def age(self) -> tuple[str, str]:
        """The sort key of markers in one namespace, oldest first."""
        return self.since, self.release


async def refuse_taken(client: KubernetesClient, own: str, namespaces: tuple[str, ...]) -> None:
    """Check that no older release serves these namespaces of the release `own` (NAMESPACE/NAME).

    Raises:
        NamespacesTaken: an older release does.
        ApiError: a request to the API server failed.
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
    """Return, for a namespaced release, each namespace whose oldest marker is another release's."""
    taken = {}
    for namespace in namespaces:
        here = [marker for marker in markers if marker.namespace in {namespace, ""}]
        if (older := _older(own, here)) is not None:
            taken[namespace] = _in_words(older)
    return taken


def _taken_cluster(own: str, found: Iterable[Marker], cluster: list[Marker]) -> dict[str, str]:
    """Return, for a cluster-wide release, every older release and where it is.

    A newer namespaced release refuses to start itself. A forged marker of a tenant looks like one.
    """
    taken = {marker.namespace: _in_words(marker) for marker in cluster if marker.release != own}
    for marker in found:
        older = _older(own, [marker, *(item for item in cluster if item.release == own)])
        if older is not None:
            taken[marker.namespace] = _in_words(older)
        elif marker.release != own:
            log.error(
                "newer release serves the same namespace",
                namespace=marker.namespace,
                release=marker.release,
            )
    return taken


def _older(own: str, markers: Iterable[Marker]) -> Marker | None:
    """Return the oldest marker of another release, unless this release's own is older."""
    mine = min((item.age for item in markers if item.release == own), default=(NOT_YET, own))
    others = [item for item in markers if item.release != own and item.age < mine]
    return min(others, key=lambda item: item.age, default=None)


def _in_words(marker: Marker) -> str:
    kind = "namespaced" if marker.namespace else "cluster-wide"
    return f"the {kind} release {marker.release} (since {marker.since})"


async def _cluster_marker(client: KubernetesClient) -> list[Marker]:
    """Return the marker of the cluster-wide release, if there is one.

    Without such a release, reading its marker is forbidden.
    """
    try:
        live = await client.read(CHILDREN[Kind.CONFIG_MAP], MARKER_NAMESPACE, MARKER_NAME)
    except ApiError as problem:
        if problem.status == 403:
            return []
        raise
    return _parsed([live] if live else [], "")


async def _markers(client: KubernetesClient, namespace: str | None) -> list[Marker]:
    """Return the namespaced releases; none if the RoleBindings of a namespace cannot be read."""
    found: list[Marker] = []
    try:
        async for page in client.list_pages(
            CHILDREN[Kind.ROLE_BINDING], namespace, selector=OPERATOR_SELECTOR
        ):
            found += _parsed(page["items"], namespace)
    except ApiError as problem:
        if namespace is None or problem.status not in {403, 404}:
            raise
        log.warning("other releases not checked", namespace=namespace, error=str(problem))
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
