"""Waits for the reason of a condition, and policies that cause one, on a real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from fleetkeeper.reconcile.observe.pod_problems import ADVICE
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_world import Live, World, condition


def apply(plane: ControlPlane, *manifests: Live) -> None:
    """Apply objects as the administrator."""
    for manifest in manifests:
        text = json.dumps(manifest)
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=text)


async def reports(
    world: World, name: str, kind: str, status: str, reason: str, *words: str
) -> None:
    """Wait for a condition with this reason, and assert that its message contains the words."""

    def holds() -> bool:
        found = condition(world.fis(name), kind)
        return (found.get("status"), found.get("reason")) == (status, reason)

    try:
        await world.until(f"{name}: {kind} {status} {reason}", holds, GUARD_S)
    except AssertionError as problem:
        stood = ((world.fis(name) or {}).get("status") or {}).get("conditions")
        raise AssertionError(f"{problem}\n{json.dumps(stood, indent=1)}") from None
    message = condition(world.fis(name), kind)["message"]
    assert len(message) <= 256
    for word in words:
        assert word in message, message


def advice_of(reason: str) -> str:
    """Return the remedy at the end of the message."""
    return next(text for known, text in ADVICE.items() if known == reason)


async def not_ready(world: World, name: str, reason: str, *words: str) -> None:
    """Wait until the service is neither ready nor available for this reason."""
    await reports(world, name, "Ready", "False", reason, *words)
    assert condition(world.fis(name), "Available")["status"] == "False"


@contextmanager
def policy(world: World, name: str, *, rule: Live, expression: str) -> Iterator[None]:
    """A ValidatingAdmissionPolicy for this namespace alone."""
    full = f"{name}-{world.namespace}"
    api = "admissionregistration.k8s.io/v1"
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}},
            "resourceRules": [{"apiVersions": ["*"], **rule}],
        },
        "validations": [{"expression": expression, "message": "the company forbids it"}],
    }
    kind = "ValidatingAdmissionPolicy"
    binding = {"policyName": full, "validationActions": ["Deny"]}
    apply(
        world.plane,
        {"apiVersion": api, "kind": kind, "metadata": {"name": full}, "spec": spec},
        {"apiVersion": api, "kind": f"{kind}Binding", "metadata": {"name": full}, "spec": binding},
    )
    try:
        yield
    finally:
        for what in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            world.plane.kubectl("delete", what, full, "--ignore-not-found")
