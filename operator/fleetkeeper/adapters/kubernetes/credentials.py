"""The API server's address and our credentials."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kubernetes.aio import config as kube_config
from kubernetes.aio.client.configuration import Configuration


class NoCredentials(RuntimeError):
    """The lack of a usable kubeconfig or service account."""


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """Return the API server's address and our credentials, from a kubeconfig or the service account.

    Raises:
        NoCredentials: they cannot be loaded; the message says what was tried.
    """
    configuration = Configuration()
    try:
        if kubeconfig is not None:
            await kube_config.load_kube_config(
                config_file=str(kubeconfig), client_configuration=configuration
            )
        else:
            kube_config.load_incluster_config(client_configuration=configuration)
    except (kube_config.ConfigException, OSError) as problem:
        tried = f"kubeconfig {kubeconfig}" if kubeconfig else "the pod's service account"
        raise NoCredentials(f"cannot use {tried}: {problem}") from problem
    configuration.connection_pool_maxsize = (
        0  # watches hold connections; requests have their own limit
    )
    configuration.retries = None
    # Otherwise aiohttp reads ~/.netrc and the environment for every request, each in a thread.
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.proxy = configuration.proxy or _proxy_of_environment(configuration.host)
    return configuration


def _proxy_of_environment(server: str) -> str | None:
    """Return the proxy for the server from HTTPS_PROXY or HTTP_PROXY, unless NO_PROXY excludes it."""
    address = urlsplit(server)
    if proxy_bypass(address.netloc):
        return None
    return getproxies().get(address.scheme)
