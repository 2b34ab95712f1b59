"""Credentials of the operator: the pod's ServiceAccount, or any kubeconfig that kubectl accepts."""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kubernetes.aio import config as kube_config
from kubernetes.aio.client.configuration import Configuration

from fleetkeeper_kube.credentials import Credentials, NoCredentials, pod_credentials

KUBECONFIG_VARIABLE = "FLEETKEEPER_KUBECONFIG"


async def load_credentials(kubeconfig: Path | None) -> Credentials:
    """Return the API server's address and our credentials, from a kubeconfig or the ServiceAccount.

    Raises:
        NoCredentials: they cannot be loaded.
    """
    if kubeconfig is None:
        found = pod_credentials(KUBECONFIG_VARIABLE)
    else:
        found = await _of_kubeconfig(kubeconfig)
    found.proxy = found.proxy or _proxy_of_environment(found.url)
    return found


async def _of_kubeconfig(path: Path) -> Credentials:
    """Load a kubeconfig with the official client, which also runs plugins for credentials."""
    loaded = Configuration()
    try:
        await kube_config.load_kube_config(config_file=str(path), client_configuration=loaded)
        context = ssl.create_default_context(cafile=loaded.ssl_ca_cert)
        if loaded.cert_file:
            context.load_cert_chain(loaded.cert_file, keyfile=loaded.key_file)
    except (kube_config.ConfigException, OSError) as problem:
        raise NoCredentials(f"cannot use kubeconfig {path}: {problem}") from problem
    if not loaded.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return Credentials(
        str(loaded.host),
        authorization=str(loaded.api_key.get("BearerToken") or ""),
        context=context,
        server_name=loaded.tls_server_name,
        proxy=loaded.proxy,
    )


def _proxy_of_environment(server: str) -> str | None:
    """Return the proxy for the server from HTTPS_PROXY or HTTP_PROXY, unless NO_PROXY excludes it."""
    address = urlsplit(server)
    if proxy_bypass(address.netloc):
        return None
    return getproxies().get(address.scheme)
