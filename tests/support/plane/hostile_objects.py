"""Objects that a tenant with edit rights may write, chosen to upset whoever reads them.

Seeded: the same generator state draws the same objects. What the API server refuses is refused; the
rest is what the operator has to live with.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from fleetkeeper.adapters.kubernetes.resources import CHILDREN, INFERENCE_SERVICE, POD, REPLICA_SET
from fleetkeeper.api.names import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_kube.resource import Resource
from tests.support.reconcile.random_specs import random_spec

Object = dict[str, Any]

REVISION: Final = "deployment.kubernetes.io/revision"
DIGITS: Final = ("²", "9" * 5000, "-1", "1e5", "٣", "", " 1", "1_0", "NaN")
QUANTITIES: Final = ("1e999", "1e-999", "9" * 60, "1E400", "0", "-1Gi", "1e3Ki", "１Gi", "", ".")
NUMBERS: Final = (-(2**63), -1, 0, 2**31, 2**53 + 1, 2**63 - 1)
TEXTS: Final = (
    "",
    "\u0000",
    "\u202e",
    "\U0001f4a5" * 40,
    "a" * 253,
    "../..",
    "{{ x }}",
    "%s%n",
    "\r\n",
)
LARGE_BYTES: Final = 200_000
DATES: Final = ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "1969-12-31T23:59:59Z")


def hostile_service(rng: random.Random, name: str) -> Object:
    """Return an InferenceService with some fields replaced by extremes. It asks for few pods."""
    spec = random_spec(rng)
    spec["replicas"] = rng.choice((0, 0, 1))
    spec.pop("scaling", None)
    spec.get("breaker", {}).pop("fallbackReplicas", None)
    for _ in range(rng.randint(0, 3)):
        _spoil(rng, spec)
    return {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.kind,
        "metadata": {"name": name, "annotations": _annotations(rng), "labels": _labels(rng, name)},
        "spec": spec,
    }


def hostile_status(rng: random.Random) -> Object:
    """Return a status that a tenant might write over ours."""
    condition = {
        "type": rng.choice(("Ready", "Degraded", "Stalled", "Unheard")),
        "status": rng.choice(("True", "False", "Unknown")),
        "reason": rng.choice(("AllReplicasReady", "RolledBack", "Unheard")),
        "message": rng.choice(TEXTS),
        "lastTransitionTime": rng.choice(DATES),
        "observedGeneration": rng.choice((0, 1, 2**31)),
    }
    return {
        "status": {
            "observedGeneration": rng.choice(NUMBERS),
            "replicas": rng.choice(NUMBERS),
            "conditions": [condition],
        }
    }


def hostile_child(rng: random.Random, services: list[str]) -> tuple[Resource, Object]:
    """Return an object that claims to be a child of one of `services`."""
    service = rng.choice(services)
    resource = rng.choice((*CHILDREN.values(), REPLICA_SET, REPLICA_SET, POD))
    name = rng.choice((service, f"{service}-fk-router", f"{service}-{rng.randint(0, 999)}"))
    return resource, {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {
            "name": name,
            "labels": {LABEL_MANAGED_BY: MANAGED_BY, LABEL_SERVICE: service},
            "annotations": {REVISION: rng.choice(DIGITS), **_annotations(rng)},
        },
        **_body(resource.kind),
    }


def _body(kind: str) -> Object:
    labels = {"app": "hostile"}
    pod = {"containers": [{"name": "engine", "image": "example.invalid/hostile:1"}]}
    template = {"metadata": {"labels": labels}, "spec": pod}
    workload = {"spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}}
    role = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "fleetkeeper-router",
    }
    bodies: dict[str, Object] = {
        Kind.DEPLOYMENT: workload,
        "ReplicaSet": workload,
        "Pod": {"spec": pod},
        Kind.SERVICE: {"spec": {"ports": [{"port": 80}]}},
        Kind.CONFIG_MAP: {"data": {"large": "x" * LARGE_BYTES}},
        Kind.POD_DISRUPTION_BUDGET: {"spec": {"selector": {"matchLabels": labels}}},
        Kind.NETWORK_POLICY: {"spec": {"podSelector": {}}},
        Kind.ROLE_BINDING: {"roleRef": role},
    }
    return bodies.get(kind, {})


def _labels(rng: random.Random, name: str) -> dict[str, str]:
    return rng.choice(({}, {LABEL_MANAGED_BY: MANAGED_BY, LABEL_SERVICE: name}))


def _annotations(rng: random.Random) -> dict[str, str]:
    return rng.choice(
        (
            {},
            {"example.com/text": rng.choice(TEXTS)},
            {"example.com/large": "x" * rng.randint(1, LARGE_BYTES)},
            {f"example.com/{number}": "x" for number in range(500)},
        )
    )


def _spoil(rng: random.Random, value: Any) -> None:
    """Replace one leaf somewhere below `value` by an extreme of its type."""
    while value:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        place = rng.choice(places)
        if isinstance(value[place], dict | list) and value[place]:
            value = value[place]
            continue
        value[place] = _extreme(rng, value[place])
        return


def _extreme(rng: random.Random, value: object) -> object:
    ways: dict[type, Callable[[], object]] = {
        bool: lambda: not value,
        int: lambda: rng.choice(NUMBERS),
        str: lambda: rng.choice(QUANTITIES + TEXTS),
    }
    return ways.get(type(value), lambda: None)()
