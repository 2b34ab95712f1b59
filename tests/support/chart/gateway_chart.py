"""The gateway in the chart, rendered with many values."""

from __future__ import annotations

from typing import Any

from tests.support.chart.helm_chart import only, rendered

NAME = "fleetkeeper-gateway"
USAGE = f"{NAME}-usage"
REDIS = f"{NAME}-redis"
BATCH = f"{NAME}-batch"
KEYS = "fleetkeeper-keys"
Live = dict[str, Any]
OBJECT_STORE: Live = {
    "url": "s3://batches/prod",
    "secret": "s3-login",
    "env": {"AWS_REGION": "eu-central-1"},
    "peers": [{"cidr": "10.9.0.0/16"}],
    "ports": [443, 9000],
}
ANY_REDIS = {"url": "redis://redis"}
VALUE_SETS: dict[str, Live] = {
    "defaults": {},
    "one-replica": {"replicas": 1},
    "own-redis": {
        "redis": {
            "url": "rediss://redis.example.com:6380/1",
            "username": "gateway",
            "passwordSecret": {"name": "redis-login", "key": "password"},
            "caSecret": {"name": "redis-ca", "key": "ca.crt"},
            "peers": [{"cidr": "10.7.0.0/16"}],
        }
    },
    "small-redis": {
        "redis": {
            "enabled": True,
            "image": "valkey:8",
            "passwordSecret": {"name": "redis-login", "key": "password"},
        }
    },
    "anonymous": {
        "anonymous": {
            "enabled": True,
            "highestTier": "batch",
            "requestsPerMinute": "standard=100,batch=20",
            "tokensPerMinute": 9_000_000,
        }
    },
    "route": {
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}],
            "hostnames": ["llm.example.com"],
        }
    },
    "placement": {
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "important",
        "podLabels": {"team": "platform"},
        "podAnnotations": {"a": "b"},
        "service": {"type": "LoadBalancer", "port": 8000, "annotations": {"a": "b"}},
    },
    "own-volume": {"usage": {"persistence": {"existingClaim": "counted"}}},
    "no-volume": {"usage": {"persistence": {"enabled": False}}},
    "own-keys": {
        "keys": {"namespace": "clients", "create": False},
        "grantKeys": {"create": False, "secretName": "signing"},
    },
    "narrow": {
        "networkPolicy": {"clients": [{"namespaceLabels": {"clients": "yes"}}]},
        "usage": {"clients": [{"podLabels": {"app": "billing"}}]},
    },
    "batch": {
        "redis": {"enabled": True, "image": "valkey:8", "persistence": {"enabled": True}},
        "batch": {"enabled": True},
    },
    "batch-objects": {
        "redis": ANY_REDIS,
        "batch": {"enabled": True, "replicas": 2, "store": OBJECT_STORE},
    },
    "batch-shared": {
        "redis": ANY_REDIS,
        "networkPolicy": {"clients": [{"namespaceLabels": {"clients": "yes"}}]},
        "batch": {
            "enabled": True,
            "replicas": 2,
            "store": {"persistence": {"accessModes": ["ReadWriteMany"], "existingClaim": "shared"}},
        },
    },
    "batch-no-volume": {
        "redis": ANY_REDIS,
        "batch": {"enabled": True, "store": {"persistence": {"enabled": False}}},
    },
    "batch-alone": {
        "enabled": False,
        "redis": {"enabled": True, "image": "valkey:8"},
        "batch": {
            "enabled": True,
            "upstream": "https://api.example.com:8443/openai",
            "upstreamKeySecret": {"name": "provider", "key": "token"},
            "upstreamPeers": [{"cidr": "192.0.2.0/24"}],
        },
    },
    "no-policies": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": False},
}


def gateway_values(name: str, **others: Any) -> Live:
    """Return the chart's values with the gateway and a value set of it."""
    return {"gateway": {"enabled": True, **VALUE_SETS[name]}, **others}


def gateway_objects(name: str) -> list[Live]:
    """Return the chart's objects with a value set, which the caller may change."""
    return rendered(gateway_values(name))


def pod_of(objects: list[Live], name: str = NAME) -> Live:
    """Return the pod template of a Deployment."""
    pod: Live = only(objects, "Deployment", name)["spec"]["template"]
    return pod


def environment(objects: list[Live], name: str = NAME) -> dict[str, str]:
    """Return the settings of a process, without their prefix."""
    (container,) = pod_of(objects, name)["spec"]["containers"]
    prefix = "FLEETKEEPER_GATEWAY_"
    return {
        item["name"].removeprefix(prefix): item["value"]
        for item in container["env"]
        if item["name"].startswith(prefix)
    }


def mounted(pod: Live) -> dict[str, Live]:
    """Return the volumes of a pod's container by the path at which they are."""
    (container,) = pod["spec"]["containers"]
    volumes = {item["name"]: item for item in pod["spec"]["volumes"]}
    assert set(volumes) == {mount["name"] for mount in container["volumeMounts"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
