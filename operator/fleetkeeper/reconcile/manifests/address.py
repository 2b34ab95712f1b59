"""The Kubernetes Service that clients call, and the one by which routers find the engines."""

from __future__ import annotations

from fleetkeeper.api.names import Component, address_name, engines_name, selector
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import RoutingPolicy
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.manifests.common import HTTP_PORT_NAME, SERVING_PORT, desired_metadata


def desired_address(service: InferenceService) -> Manifest:
    """Return the Service that maps port 80 to the router, or to the engines if routing is None.

    The node ports and addresses that the cluster assigns are not part of it, so they cause no write.
    """
    component = (
        Component.ENGINE if service.spec.routing.policy is RoutingPolicy.NONE else Component.ROUTER
    )
    section = service.spec.service
    metadata = desired_metadata(service, address_name(service.name), component)
    if section.annotations:
        metadata["annotations"] = dict(section.annotations)
    spec: Manifest = {
        "type": str(section.type),
        "selector": selector(service.name, component),
        "ports": [
            {
                "name": HTTP_PORT_NAME,
                "port": 80,
                "protocol": "TCP",
                "targetPort": HTTP_PORT_NAME,
            }
        ],
    }
    if section.load_balancer_class is not None:
        spec["loadBalancerClass"] = section.load_balancer_class
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def desired_engines_address(service: InferenceService) -> Manifest:
    """Return the headless Service whose name has the addresses of all engines, ready or not.

    A router asks each of them whether it is ready: it knows that sooner than the DNS could.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": desired_metadata(service, engines_name(service.name), Component.ENGINE),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector(service.name, Component.ENGINE),
            "ports": [
                {
                    "name": HTTP_PORT_NAME,
                    "port": SERVING_PORT,
                    "protocol": "TCP",
                    "targetPort": HTTP_PORT_NAME,
                }
            ],
        },
    }
