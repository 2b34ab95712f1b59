"""Namespaces of a gateway in a real cluster, with the rights that it needs and no other."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from fleetkeeper_gateway.keys import KeysSettings, WatchedKeys
from fleetkeeper_gateway.kubernetes.settings import load_credentials
from fleetkeeper_gateway.services import ServicesSettings, WatchedServices
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.gateway.client_keys import RecordedAudit, key_entries, key_secret
from tests.support.guards import GUARD_S
from tests.support.operators.command import Ran, run_command
from tests.support.plane.crds import install_crds

READS = ["get", "list", "watch"]
SERVICE_RULES = [
    {"apiGroups": ["fleetkeeper.io"], "resources": ["inferenceservices"], "verbs": READS}
]
"""In a ClusterRole bound cluster-wide, or in a Role of each served namespace."""
KEY_RULES = [{"apiGroups": [""], "resources": ["secrets"], "verbs": READS}]
"""In a Role of the keys namespace, which holds nothing else."""
MARKS = "fleetkeeper-wake-marks"
MARK_RULES = [
    {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [MARKS],
        "verbs": ["list", "watch", "patch"],
    }
]
"""In a Role of the gateway's own namespace."""
_NUMBERS = itertools.count(1)
_PREPARED: set[Path] = set()
"""Directories of the control planes that have the CRD."""


class Running(Protocol):
    """A part of the gateway with a task of its own."""

    async def run(self) -> None:
        """Run until cancelled."""


@asynccontextmanager
async def running(part: Running) -> AsyncIterator[None]:
    """Run a part of the gateway; fail if it ends by itself."""
    task = asyncio.create_task(part.run())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(what: str, holds: Callable[[], bool]) -> None:
    """Wait until something is true."""
    try:
        async with asyncio.timeout(GUARD_S):
            while not holds():  # noqa: ASYNC110 - what several tasks reach has no event
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited {GUARD_S:g} s in vain: {what}") from None


@dataclass
class GatewayWorld:
    """A namespace with services, one with keys, and the gateway's user."""

    plane: ControlPlane
    namespace: str
    keys_namespace: str
    user: str
    audit: RecordedAudit = field(default_factory=RecordedAudit)

    def keys(self, kubeconfig: Path | None = None, **settings: Any) -> WatchedKeys:
        """Return the gateway's keys, read as its user or through a proxy."""
        found = KeysSettings(keys_namespace=self.keys_namespace, **settings)
        return WatchedKeys(found, load_credentials(self.json_kubeconfig(kubeconfig)), self.audit)

    def services(self, *namespaces: str, kubeconfig: Path | None = None) -> WatchedServices:
        """Return the gateway's services, of all namespaces if none is named."""
        found = ServicesSettings(namespaces=namespaces)
        return WatchedServices(found, load_credentials(self.json_kubeconfig(kubeconfig)))

    def json_kubeconfig(self, source: Path | None = None) -> Path:
        """Write a kubeconfig as JSON, as the gateway reads it; by default its user's."""
        source = source or self.plane.user_kubeconfig(self.user)
        path = source.with_suffix(".json")
        path.write_text(json.dumps(yaml.safe_load(source.read_text())))
        return path

    def apply(self, *manifests: dict[str, Any]) -> None:
        """Apply objects as the administrator."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.plane.kubectl("apply", "-f", "-", input=json.dumps(listed))

    def put_key(self, secret_name: str, key: str, /, **entries: str) -> None:
        """Create or change the Secret of a key."""
        self.apply(
            key_secret(secret_name, key_entries(key, **entries), namespace=self.keys_namespace)
        )

    def delete_key(self, name: str) -> None:
        """Delete the Secret of a key."""
        self.plane.kubectl("-n", self.keys_namespace, "delete", "secret", name, "--wait=false")

    def key_entries(self, name: str) -> dict[str, str]:
        """Return the entries of a key's Secret."""
        found = self.plane.kubectl("-n", self.keys_namespace, "get", "secret", name, "-o", "json")
        data = json.loads(found)["data"]
        return {entry: base64.b64decode(value).decode() for entry, value in data.items()}

    def put_service(self, name: str, namespace: str = "", **model: Any) -> None:
        """Create or change an InferenceService."""
        self.apply(
            {
                "apiVersion": "fleetkeeper.io/v1alpha1",
                "kind": "InferenceService",
                "metadata": {"name": name, "namespace": namespace or self.namespace},
                "spec": {"model": {"source": "pvc://models/a", **model}},
            }
        )

    async def command(self, *arguments: str, kubeconfig: Path | None = None) -> Ran:
        """Run `fleetkeeper keys` as the administrator, or with another kubeconfig."""
        return await asyncio.to_thread(
            run_command,
            *("keys", *arguments, "--keys-namespace", self.keys_namespace),
            kubeconfig=kubeconfig or self.plane.kubeconfig,
        )


def new_world(plane: ControlPlane) -> GatewayWorld:
    """Create the namespaces and the rights of a gateway that serves the whole cluster."""
    number = next(_NUMBERS)
    label = f"gateway-{os.getpid()}-{number}"
    world = GatewayWorld(plane, label, f"{label}-keys", f"{label}-user")
    if plane.directory not in _PREPARED:
        install_crds(plane)
        _PREPARED.add(plane.directory)
    world.apply(
        *(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            for name in (world.namespace, world.keys_namespace)
        ),
        *role("ClusterRole", label, "", SERVICE_RULES, world.user),
        *role("Role", "keys", world.keys_namespace, KEY_RULES, world.user),
        *role("Role", MARKS, world.namespace, MARK_RULES, world.user),
    )
    return world


def role(
    kind: str, name: str, namespace: str, rules: list[dict[str, Any]], user: str
) -> list[dict[str, Any]]:
    """Return a role and its binding to a user."""
    group = "rbac.authorization.k8s.io"
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return [
        {"apiVersion": f"{group}/v1", "kind": kind, "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": kind, "name": name},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
        },
    ]
