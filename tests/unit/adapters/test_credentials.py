"""The credentials of the operator."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fleetkeeper.adapters.kubernetes.credentials import load_credentials
from fleetkeeper_kube.credentials import NoCredentials


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy:3128"}, "http://proxy:3128"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "api.example"}, None),
        ({"http_proxy": "http://proxy:3128"}, None),
    ],
    ids=["none", "a proxy", "excepted", "another scheme"],
)
async def test_the_environment_is_asked_for_a_proxy_once_at_the_start(
    environment: dict[str, str],
    proxy: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "kubeconfig"
    file.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "a",
                "clusters": [{"name": "a", "cluster": {"server": "https://api.example:6443"}}],
                "users": [{"name": "a", "user": {"token": "t"}}],
                "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            }
        )
    )
    credentials = await load_credentials(file)
    assert credentials.proxy == proxy
    assert credentials.headers() == {"Authorization": "Bearer t"}


async def test_a_kubeconfig_may_name_a_program_that_has_the_token(tmp_path: Path) -> None:
    status = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "from-the-program"},
    }
    plugin = {
        "apiVersion": status["apiVersion"],
        "interactiveMode": "Never",
        "command": sys.executable,
        "args": ["-c", f"print({json.dumps(json.dumps(status))})"],
    }
    file = tmp_path / "kubeconfig"
    cluster = {
        "server": "https://api.example:6443/",
        "insecure-skip-tls-verify": True,
        "tls-server-name": "kubernetes",
    }
    file.write_text(
        json.dumps(
            {
                "current-context": "a",
                "clusters": [{"name": "a", "cluster": cluster}],
                "users": [{"name": "a", "user": {"exec": plugin}}],
                "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            }
        )
    )
    credentials = await load_credentials(file)
    assert credentials.headers() == {"Authorization": "Bearer from-the-program"}
    assert (credentials.url, credentials.server_name) == ("https://api.example:6443", "kubernetes")
    assert credentials.context is not None
    assert not credentials.context.check_hostname


async def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoCredentials, match="absent"):
        await load_credentials(tmp_path / "absent")


async def test_outside_a_pod_the_error_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NoCredentials, match="FLEETKEEPER_KUBECONFIG"):
        await load_credentials(None)
