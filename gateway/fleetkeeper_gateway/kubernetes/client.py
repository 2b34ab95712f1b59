"""HTTP client of the API server that lists and watches. It retries nothing: its callers do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from fleetkeeper_gateway.kubernetes.credentials import Credentials
from fleetkeeper_gateway.kubernetes.errors import ApiError, TooLarge, parse_failure

PAGE: Final = 100
"""Objects in a page of a list. While one is decoded, no request is served: 100 services take 10 ms."""
ANSWER_BYTES: Final = 4 * 1024 * 1024
"""Limit of a page, and of a line of a watch. One object has at most 1.5 MiB, the limit of etcd."""
FAILURE_BYTES: Final = 64 * 1024
LIST_TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 5.0
SERVER_TIMEOUT_S: Final = 290
"""After this time the server ends a watch, and it is resumed."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource of the API."""

    prefix: str
    """`/api/v1`, or `/apis/GROUP/VERSION`."""
    plural: str

    def path(self, namespace: str | None) -> str:
        """Return the path of its objects in a namespace, or in all (None)."""
        inside = f"/namespaces/{namespace}" if namespace else ""
        return f"{self.prefix}{inside}/{self.plural}"


SECRETS: Final = Resource("/api/v1", "secrets")
PODS: Final = Resource("/api/v1", "pods")
INFERENCE_SERVICES: Final = Resource("/apis/fleetkeeper.io/v1alpha1", "inferenceservices")


class KubernetesClient:
    """A client of one API server, for one event loop. Use it as an async context manager."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the session. A watch holds a connection, so their number has no limit."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def list_pages(
        self, resource: Resource, namespace: str | None, *, selector: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the pages of a list, one at a time. Large objects make for smaller pages.

        Raises:
            ApiError: the server refused, or there was no usable response; 410 if the list expired
                between two pages.
        """
        params = {"labelSelector": selector} if selector else {}
        limit = PAGE
        while True:
            try:
                page = await self._page(resource.path(namespace), {**params, "limit": str(limit)})
            except TooLarge:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)
                continue
            yield page
            following = page["metadata"].get("continue")
            if not following:
                return
            params["continue"] = following

    async def _page(self, path: str, params: dict[str, str]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S), self._opened(path, params) as response:
                content = await _bounded(response.content, ANSWER_BYTES)
        except TimeoutError as problem:
            raise ApiError(
                0, "Timeout", f"no response to GET {path} in {LIST_TIMEOUT_S:g} s"
            ) from problem
        page = decoded(content)
        if not isinstance(page.get("items"), list) or not isinstance(page.get("metadata"), dict):
            raise ApiError(0, "BrokenAnswer", f"the list {path} has no items or metadata")
        return page

    @contextlib.asynccontextmanager
    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        version: str,
        selector: str = "",
        silence_s: float,
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Return the events of a watch that starts just after the resourceVersion `version`.

        Raises:
            ApiError: the watch was refused, broke, or was silent for longer than `silence_s`.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(SERVER_TIMEOUT_S),
        }
        if selector:
            params["labelSelector"] = selector
        path = resource.path(namespace)
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(LIST_TIMEOUT_S):
                    response = await stack.enter_async_context(self._opened(path, params))
                yield _events(response.content, path, silence_s)
        except TimeoutError as problem:
            raise ApiError(0, "Timeout", f"no response to a watch of {path}") from problem

    @contextlib.asynccontextmanager
    async def _opened(
        self, path: str, params: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Return the response with status 200 to a GET."""
        assert self._session is not None, "use the client as an async context manager"  # noqa: S101
        try:
            async with self._session.get(
                f"{self._credentials.url}{path}",
                params=params,
                headers={
                    "Accept": "application/json",
                    "Accept-Encoding": "identity",
                    "User-Agent": "fleetkeeper-gateway",
                    **self._credentials.headers(),
                },
                ssl=self._credentials.tls(),
                allow_redirects=False,  # another server must not get the token
            ) as response:
                if response.status != 200:
                    body = await response.content.read(FAILURE_BYTES)
                    raise parse_failure(response.status, body, response.headers.get("Retry-After"))
                try:
                    yield response
                finally:
                    _abort(response)
        except (aiohttp.ClientError, OSError, ssl.SSLError) as problem:
            if isinstance(problem, TimeoutError):
                raise
            raise ApiError(
                0, type(problem).__name__, f"GET {path}: {problem or 'connection lost'}"
            ) from problem


def _abort(response: aiohttp.ClientResponse) -> None:
    """Close the connection of a response that was not read to its end.

    A watch has no end. An orderly end of TLS would wait for the server, beyond the end of the loop.
    """
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def decoded(content: bytes) -> dict[str, Any]:
    """Return the decoded object.

    Raises:
        ApiError: it is not JSON, or not an object.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise ApiError(0, "BrokenAnswer", "a response is not JSON") from problem
    if not isinstance(value, dict):
        raise ApiError(0, "BrokenAnswer", "a response is not a JSON object")
    return value


async def _bounded(content: aiohttp.StreamReader, limit: int) -> bytes:
    found = bytearray()
    async for chunk in content.iter_any():
        found += chunk
        if len(found) > limit:
            raise TooLarge(limit)
    return bytes(found)


async def _events(
    content: aiohttp.StreamReader, path: str, silence_s: float
) -> AsyncIterator[dict[str, Any]]:
    """Yield the decoded lines of a watch."""
    line = bytearray()
    while True:
        try:
            async with asyncio.timeout(silence_s):
                chunk = await content.readany()
        except TimeoutError as problem:
            raise ApiError(
                0, "SilentWatch", f"no event or bookmark of {path} for {silence_s:g} s"
            ) from problem
        if not chunk:
            return
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line += end
            if line:
                yield decoded(bytes(line))
            line.clear()
        line += rest
        if len(line) > ANSWER_BYTES:
            raise TooLarge(ANSWER_BYTES)
