"""Comparison of the cluster's CRD with the one that this operator was built with."""

from __future__ import annotations

from functools import lru_cache

import structlog

from fleetkeeper.adapters.kubernetes.openapi import missing_fields, observe_schema
from fleetkeeper.api.schema.crd import desired_crd
from fleetkeeper.common.values import Manifest
from fleetkeeper.runtime.reconciler.controller import Controller
from fleetkeeper_kube.client import KubernetesClient

log = structlog.get_logger(__name__)


class CrdAbsent(LookupError):
    """The cluster does not serve InferenceService: the CRD is not installed (yet)."""


class CrdCheck:
    """The comparison, whose result the controller shows in the status of every service."""

    def __init__(self, client: KubernetesClient, controller: Controller) -> None:
        self._client = client
        self._controller = controller

    async def observe(self) -> None:
        """Pass the fields of our schema that the cluster's CRD lacks to the controller.

        Fields that only the cluster knows belong to a newer operator and are harmless.

        Raises:
            CrdAbsent: the CRD is not installed.
            ApiError: the schema could not be read.
        """
        live = await observe_schema(self._client)
        if live is None:
            raise CrdAbsent("CRD inferenceservices.fleetkeeper.io is not installed; install it")
        missing = missing_fields(_our_schema(), live)
        if missing and missing != self._controller.crd_missing:
            log.error("CRD is older than this operator", missing=list(missing))
        self._controller.crd_missing = missing


@lru_cache(maxsize=1)
def _our_schema() -> Manifest:
    schema: Manifest = desired_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema
