"""The reflectors of the objects that carry our label."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from fleetkeeper.api.names import LABEL_MANAGED_BY, MANAGED_BY
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.reflector import Reflector, Sink
from fleetkeeper_kube.resource import Resource

SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"

Report = Callable[[ApiError | None], None]
"""Called with the reason why a resource cannot be read, or None after it was read."""


def watch_managed(
    client: KubernetesClient,
    resource: Resource,
    namespace: str | None,
    sink: Sink,
    report: Report | None,
) -> Reflector:
    """Return the reflector of our objects of a resource, in one namespace or in all.

    With `report` a denial is reported and retried. Without it, a denial before the first list ends
    the reflector with an ApiError: waiting would hide it.
    """
    return Reflector(client, resource, namespace, sink, _Reads(report), selector=SELECTOR)


async def all_settled(reflectors: Iterable[Reflector]) -> None:
    """Wait until every reflector has finished a list, or has reported why it cannot."""
    for reflector in reflectors:
        await reflector.settled.wait()


class _Reads:
    """The failures after which a resource is not known: denials, and any before the first list."""

    def __init__(self, report: Report | None) -> None:
        self._report = report

    def failed(self, reflector: Reflector, problem: ApiError) -> None:
        """Report such a failure."""
        if not problem.is_denial and reflector.synced.is_set():
            return
        if self._report is not None:
            self._report(problem)
            reflector.settled.set()
        elif problem.is_denial and not reflector.synced.is_set():
            raise problem

    def recovered(self, reflector: Reflector) -> None:
        """Report that the resource can be read."""
        del reflector
        if self._report is not None:
            self._report(None)
