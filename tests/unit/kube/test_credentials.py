"""Where the API server is, and the token that the kubelet replaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper_kube import credentials
from fleetkeeper_kube.credentials import NoCredentials, json_credentials, pod_credentials
from fleetkeeper_local.control_plane.pki import Authority


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Play a pod; return the directory of its ServiceAccount."""
    Authority(tmp_path, "ca").ensure()
    (tmp_path / "token").write_text("first\n")
    monkeypatch.setattr(credentials, "ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return tmp_path


def replace(path: Path, text: str) -> None:
    """Replace a file as the kubelet does: by another one."""
    other = path.with_suffix(".next")
    other.write_text(text)
    other.replace(path)


def test_a_token_that_was_replaced_is_read_again(pod: Path) -> None:
    found = pod_credentials("OUR_KUBECONFIG")
    assert found.url == "https://10.0.0.1:443"
    assert found.headers() == {"Authorization": "Bearer first"}
    replace(pod / "token", "second")
    assert found.headers() == {"Authorization": "Bearer second"}
    assert "second" not in repr(found)


def test_an_authority_that_was_replaced_is_trusted_from_then_on(pod: Path) -> None:
    found = pod_credentials("OUR_KUBECONFIG")
    first = found.tls()
    assert found.tls() is first, "a new context for each request would cost a handshake each"
    Authority(pod / "new", "ca").ensure()
    replace(pod / "ca.crt", (pod / "new" / "ca.crt").read_text())
    assert found.tls() is not first


def test_an_address_of_ipv6_is_in_brackets(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert pod_credentials("OUR_KUBECONFIG").url == "https://[fd00::1]:443"


def test_outside_a_pod_the_error_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NoCredentials, match="OUR_KUBECONFIG"):
        pod_credentials("OUR_KUBECONFIG")


def test_a_pod_without_a_token_is_told_what_to_set(pod: Path) -> None:
    (pod / "token").unlink()
    with pytest.raises(NoCredentials, match="automountServiceAccountToken"):
        pod_credentials("OUR_KUBECONFIG")


@pytest.mark.parametrize("file", ["token", "ca.crt"])
def test_an_empty_file_is_no_credential(pod: Path, file: str) -> None:
    """Without a CA of its own, a client would trust those of the system."""
    (pod / file).write_text("\n")
    with pytest.raises(NoCredentials, match=f"{file} is empty"):
        pod_credentials("OUR_KUBECONFIG")


def _kubeconfig(path: Path, **user: str) -> dict[str, Any]:
    return {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443/"}}],
        "users": [{"name": "u", "user": user}],
    }


def test_a_kubeconfig_has_the_address_and_the_token(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(_kubeconfig(path, token="mine")))
    found = json_credentials(path)
    assert (found.url, found.headers()) == (
        "https://10.0.0.1:6443",
        {"Authorization": "Bearer mine"},
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clusters: []", "kubectl config view --raw --flatten -o json"),
        ("[]", "current-context"),
        ("{}", "current-context"),
        ('{"current-context": "x", "contexts": [], "clusters": [], "users": []}', "'x'"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(NoCredentials) as refused:
        json_credentials(path)
    assert str(path) in str(refused.value)
    assert words in str(refused.value)


def test_an_absent_kubeconfig_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoCredentials, match="absent"):
        json_credentials(tmp_path / "absent")
