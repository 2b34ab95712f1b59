"""Comparison of the cluster's CRD with the one that this operator was built with."""

from __future__ import annotations

from functools import lru_cache

from fleetkeeper.adapters.kubernetes.client import KubernetesClient
from fleetkeeper.adapters.kubernetes.openapi import missing_fields, observe_schema
from fleetkeeper.api.schema.crd import desired_crd
from fleetkeeper.common.values import Manifest


class CrdAbsent(LookupError):
    """The cluster does not serve InferenceService: the CRD is not installed (yet)."""


async def observe_crd_missing(client: KubernetesClient) -> tuple[str, ...]:
    """Return the fields of our schema that the cluster's CRD lacks; none if they agree.

    Fields that only the cluster knows belong to a newer operator and are harmless.

    Raises:
        CrdAbsent: the CRD is not installed.
        ApiError: the schema could not be read.
    """
    live = await observe_schema(client)
    if live is None:
        raise CrdAbsent("CRD inferenceservices.fleetkeeper.io is not installed; install it")
    return missing_fields(_our_schema(), live)


@lru_cache(maxsize=1)
def _our_schema() -> Manifest:
    schema: Manifest = desired_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema
