"""Signing keys on a real API server: created once, with the right to create alone, and rotated."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetkeeper_gateway.grants.keys import read_keys
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.command import Ran, run_command


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    name = f"keys-{secrets.token_hex(3)}"
    control_plane.kubectl("create", "namespace", name)
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


def command(kubeconfig: Path, *arguments: str) -> Ran:
    return run_command("signing-keys", *arguments, kubeconfig=kubeconfig)


def entries(plane: ControlPlane, namespace: str, name: str) -> dict[str, str]:
    found = json.loads(plane.kubectl("-n", namespace, "get", "secret", name, "-o", "json"))
    return {key: base64.b64decode(text).decode() for key, text in found["data"].items()}


def test_the_job_creates_both_secrets_once_without_reading_any(
    control_plane: ControlPlane, namespace: str
) -> None:
    """As the chart's hook runs it, at each installation and upgrade."""
    user = f"keys-{namespace}"
    control_plane.kubectl(
        *("-n", namespace, "create", "role", "keys", "--verb=create", "--resource=secrets")
    )
    control_plane.kubectl(
        *("-n", namespace, "create", "rolebinding", "keys", "--role=keys", f"--user={user}")
    )
    kubeconfig = control_plane.user_kubeconfig(user)
    arguments = ("create", "--secret=control", f"--namespace={namespace}")
    first = command(kubeconfig, *arguments)
    assert (first.code, first.out) == (0, f"created Secret {namespace}/control\n")
    before = entries(control_plane, namespace, "control")
    assert set(before) == {"key.pem", "jwks.json"}
    # The upgrade that brings the gateway.
    second = command(kubeconfig, *arguments, "--grant-secret=grants")
    assert second.code == 0, second.err
    assert "control already exists; unchanged" in second.out
    assert entries(control_plane, namespace, "control") == before
    grants = entries(control_plane, namespace, "grants")
    assert set(grants) == {"signing.pem", "jwks.json"}
    assert command(kubeconfig, *arguments, "--grant-secret=grants").code == 0
    assert entries(control_plane, namespace, "grants") == grants


def test_a_rotation_gives_the_gateway_files_that_it_reads(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    where = ("--grant-secret=grants", f"--namespace={namespace}")
    kubeconfig = control_plane.kubeconfig
    absent = command(kubeconfig, "rotate", *where)
    assert absent.code == 1
    assert "grants" in absent.err
    assert command(kubeconfig, "create", *where).code == 0
    before = entries(control_plane, namespace, "grants")
    rotated = command(kubeconfig, "rotate", *where, "--after=0s")
    assert rotated.code == 0, rotated.err
    assert "warning" in rotated.err
    after = entries(control_plane, namespace, "grants")
    for name, text in after.items():
        (tmp_path / name).write_text(text)
    keys = read_keys(tmp_path)
    assert keys.following is not None
    assert set(keys.trusted) == {keys.signing.kid, keys.following.kid}
    assert after["signing.pem"] == before["signing.pem"]
    # The second begins where the first ended; one that is under way is not overtaken.
    assert command(kubeconfig, "rotate", *where).code == 0
    assert entries(control_plane, namespace, "grants")["signing.pem"] == after["next.pem"]
    again = command(kubeconfig, "rotate", *where)
    assert again.code == 1
    assert f"cannot rotate the grant keys of Secret {namespace}/grants: a rotation" in again.err


def test_a_secret_without_data_is_told_in_a_line(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl("-n", namespace, "create", "secret", "generic", "grants")
    found = command(
        control_plane.kubeconfig, "rotate", "--grant-secret=grants", f"--namespace={namespace}"
    )
    assert found.code == 1
    assert "signing.pem is missing" in found.err


def test_a_secret_without_grant_keys_is_not_changed(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl(
        "-n", namespace, "create", "secret", "generic", "grants", "--from-literal=a=b"
    )
    found = command(
        control_plane.kubeconfig, "rotate", "--grant-secret=grants", f"--namespace={namespace}"
    )
    assert found.code == 1
    assert "signing.pem is missing" in found.err
    assert entries(control_plane, namespace, "grants") == {"a": "b"}
