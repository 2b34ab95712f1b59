"""HTTP to the API server: one session, reused connections, few in flight, every wait bounded.

Retried here is only what costs nobody anything: a request on a kept connection that the server had
closed meanwhile, and 429 after the seconds that it names. Everything else goes to the caller, whose
queue backs off: two layers that retry multiply.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from fleetkeeper.adapters.kubernetes.errors import ApiError, BrokenAnswer, parse_failure
from fleetkeeper.adapters.kubernetes.resources import Resource

REQUEST_TIMEOUT_S: Final = 4.0
"""With the 10 s within which a lease must have been renewed: a write is taken by 14 s, or never."""
LIST_TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 24
"""Requests at a time. Peers lost their throughput to one worker or to 20 requests a second."""
RETRIES_429: Final = 3
LONGEST_RETRY_AFTER_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 4.0
USER_AGENT: Final = "fleetkeeper"

Checkpoint = Callable[[], None]
"""Called just before a request is sent, each time that it is sent; raises to prevent it."""


class NoCredentials(RuntimeError):
    """Neither a kubeconfig nor a service account is there."""


class AnswerObserver(Protocol):
    """Told when the status line of an answer arrived: the server did what it did."""

    def __call__(self) -> None:
        """The answer's headers are here, its body is not."""


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """Where the API server is and who we are: a kubeconfig if given, else the service account.

    Raises:
        NoCredentials: neither works; the message says what was tried.
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
    # Else aiohttp reads ~/.netrc and the environment again, each in a thread, for every request.
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.proxy = configuration.proxy or _proxy_of_environment(configuration.host)
    return configuration


def _proxy_of_environment(server: str) -> str | None:
    """The proxy that HTTPS_PROXY and its kin name for the server, unless NO_PROXY excepts it."""
    address = urlsplit(server)
    if proxy_bypass(address.netloc):
        return None
    return getproxies().get(address.scheme)


class KubernetesClient:
    """Requests to one API server. Safe to share between tasks of one event loop."""

    def __init__(self, configuration: Configuration, *, in_flight: int = IN_FLIGHT) -> None:
        self._api = ApiClient(configuration)
        self._api.user_agent = USER_AGENT
        self._slots = asyncio.Semaphore(in_flight)

    async def close(self) -> None:
        """Ends all connections."""
        await self._api.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        timeout_s: float = REQUEST_TIMEOUT_S,
        before_send: Checkpoint | None = None,
        on_answer: AnswerObserver | None = None,
    ) -> dict[str, Any]:
        """The decoded answer.

        Raises:
            ApiError: the server refused, or no usable answer came (status 0).
        """
        url = self._url(path, params)
        limited = 0
        reset = False
        async with self._slots:
            while True:
                if before_send is not None:
                    before_send()
                try:
                    return await self._once(
                        method,
                        url,
                        body=body,
                        content_type=content_type,
                        timeout_s=timeout_s,
                        on_answer=on_answer,
                    )
                except _StaleConnection as problem:
                    if reset:
                        raise ApiError(0, "ConnectionReset", str(problem)) from problem
                    reset = True
                except ApiError as problem:
                    limited += 1
                    if problem.status != 429 or limited > RETRIES_429:
                        raise
                    await asyncio.sleep(min(problem.retry_after_s or 1.0, LONGEST_RETRY_AFTER_S))

    async def _once(
        self,
        method: str,
        url: str,
        *,
        body: Mapping[str, Any] | None,
        content_type: str,
        timeout_s: float,
        on_answer: AnswerObserver | None,
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._api.call_api(
                    method,
                    url,
                    header_params=await self._headers(content_type),
                    body=body,
                    _request_timeout=aiohttp.ClientTimeout(total=timeout_s),
                )
                if on_answer is not None:
                    on_answer()
                content = await answer.read()
        except TimeoutError as problem:
            raise ApiError(
                0, "Timeout", f"no answer to {method} {url} in {timeout_s} s"
            ) from problem
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as problem:
            raise _StaleConnection(f"{method} {url}: {problem}") from problem
        except aiohttp.ClientError as problem:
            raise BrokenAnswer(f"{method} {url}: {problem}") from problem
        if not 200 <= answer.status <= 299:
            raise parse_failure(answer.status, content, answer.getheader("Retry-After"))
        return _decoded(content)

    async def read(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """The object, or None where there is none.

        Raises:
            ApiError: as `request`.
        """
        try:
            return await self.request("GET", resource.path(namespace, name))
        except ApiError as problem:
            if problem.is_absent:
                return None
            raise

    async def list_pages(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        selector: str = "",
        field_selector: str = "",
        page_size: int = 200,
    ) -> AsyncIterator[dict[str, Any]]:
        """The pages of a list, one at a time; a page is dropped before the next is read.

        Raises:
            ApiError: as `request`; 410 when the list grew too old between two pages.
        """
        params = {"limit": str(page_size)}
        if selector:
            params["labelSelector"] = selector
        if field_selector:
            params["fieldSelector"] = field_selector
        while True:
            page = await self.request(
                "GET", resource.path(namespace), params=params, timeout_s=LIST_TIMEOUT_S
            )
            following = str((page.get("metadata") or {}).get("continue") or "")
            yield page
            del page
            if not following:
                return
            params["continue"] = following

    @contextlib.asynccontextmanager
    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        resource_version: str,
        selector: str = "",
        server_timeout_s: int,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a watch, from just after `resource_version`.

        Raises:
            ApiError: the watch was refused or broke.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(server_timeout_s),
        }
        if selector:
            params["labelSelector"] = selector
        url = self._url(resource.path(namespace), params)
        answer = None
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                answer = await self._api.call_api(
                    "GET",
                    url,
                    header_params=await self._headers("application/json"),
                    _request_timeout=aiohttp.ClientTimeout(
                        total=None, sock_connect=CONNECT_TIMEOUT_S
                    ),
                )
                if answer.status != 200:
                    refused = parse_failure(
                        answer.status, await answer.read(), answer.getheader("Retry-After")
                    )
                    raise refused
            yield _lines(answer.response)
        except TimeoutError as problem:
            raise ApiError(0, "Timeout", f"no answer to a watch of {resource.plural}") from problem
        except aiohttp.ClientError as problem:
            raise ApiError(0, "WatchCut", f"watch of {resource.plural}: {problem}") from problem
        finally:
            if answer is not None:
                answer.response.close()

    def _url(self, path: str, params: dict[str, str] | None) -> str:
        query = f"?{urlencode(params)}" if params else ""
        return f"{self._api.configuration.host}{path}{query}"

    async def _headers(self, content_type: str) -> dict[str, str]:
        """Fresh for each request: the client refreshes a service account's token while it asks."""
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # compression of a long list costs both sides more than it saves
            "Content-Type": content_type,
            "User-Agent": self._api.user_agent,
        }
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        return headers


class _StaleConnection(Exception):
    """A connection broke before an answer came, as kept ones do when the server closed them."""


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Whole lines of any length: an object may be larger than the reader's buffer."""
    parts: list[bytes] = []
    async for chunk in response.content.iter_any():
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            parts.append(line)
            joined = b"".join(parts)
            parts.clear()
            if joined:
                yield joined
        if rest:
            parts.append(rest)


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as problem:
        raise BrokenAnswer(f"the answer is not JSON: {content[:120]!r}") from problem
    if not isinstance(value, dict):
        raise BrokenAnswer(f"the answer is no object: {content[:120]!r}")
    return value
