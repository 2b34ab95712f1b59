"""Whether the CRD of the cluster is the one that this operator was built with."""

from __future__ import annotations

from functools import lru_cache

from fleetkeeper.adapters.kubernetes.client import KubernetesClient
from fleetkeeper.adapters.kubernetes.openapi import missing_fields, observe_schema
from fleetkeeper.api.crd import desired_crd
from fleetkeeper.plan.model import Manifest


class CrdAbsent(LookupError):
    """The cluster serves no InferenceService: the CRD is not installed (yet)."""


async def observe_crd_missing(client: KubernetesClient) -> tuple[str, ...]:
    """The fields of our schema that the cluster's CRD lacks; none when they agree.

    Fields that only the cluster knows are those of a newer operator, and harmless.

    Raises:
        CrdAbsent: there is no such resource at all.
        ApiError: the schema could not be read.
    """
    live = await observe_schema(client)
    if live is None:
        raise CrdAbsent("the cluster has no inferenceservices.fleetkeeper.io: install the CRD")
    return missing_fields(_our_schema(), live)


@lru_cache(maxsize=1)
def _our_schema() -> Manifest:
    schema: Manifest = desired_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema
