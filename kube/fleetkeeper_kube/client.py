"""HTTP client of the API server: one session, reused connections, few in flight, bounded waits.

Only two failures are retried here: a request on a kept-alive connection that the server had closed, and
429 after the number of seconds in the response. All other failures go to the caller, which backs off:
the retries of two layers would multiply.

A 429 pauses the whole client: the server asked for fewer requests, so all others wait too, without
taking a slot. Requests that must not wait use a separate client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from fleetkeeper_kube.bounds import (
    ANSWER_BYTES,
    FIRST_PAGE,
    GROWTH,
    bounded_lines,
    decoded,
    next_limit,
    page_of_one,
    read_bounded,
    read_start,
)
from fleetkeeper_kube.credentials import Credentials
from fleetkeeper_kube.errors import ApiError, BrokenAnswer, NotTaken, parse_failure
from fleetkeeper_kube.reading import as_map, maps, stand_in, text
from fleetkeeper_kube.resource import Resource
from fleetkeeper_kube.slots import RequestSlots

REQUEST_TIMEOUT_S: Final = 4.0
"""With the leader's renewal deadline of 10 s: a write is applied within 14 s of a renewal, or never."""
LIST_TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 24
"""Concurrent requests. Comparable operators are slow with one worker or 20 requests a second."""
FAILURE_BYTES: Final = 64 * 1024
"""Bytes read of a response other than 2xx."""
CONTINUE_LIMIT: Final = 16 * 1024
RETRIES_429: Final = 3
CONNECT_TIMEOUT_S: Final = 4.0
USER_AGENT: Final = "fleetkeeper"
PAGE: Final = 200
"""Objects in a page of a list, at most."""

Checkpoint = Callable[[], None]
"""Called before a request is sent, and before each retry here; raises to prevent it. It is not called
before the one repetition of a PUT or DELETE that aiohttp makes when a kept-alive connection was closed."""


class KubernetesClient:
    """A client of one API server. The tasks of one event loop can share it.

    Use it as an async context manager.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        user_agent: str = USER_AGENT,
        in_flight: int = IN_FLIGHT,
        retries_429: int = RETRIES_429,
    ) -> None:
        """With `retries_429=0` a 429 is raised at once and does not pause other requests."""
        self._credentials = credentials
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._slots = RequestSlots(in_flight)
        self._retries_429 = retries_429
        self.on_date: Callable[[str], None] | None = None
        """Called with the `Date` header of every response: the API server's time."""

    async def __aenter__(self) -> Self:
        """Open the session. A watch holds a connection, so their number has no limit."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            # Otherwise aiohttp reads ~/.netrc and the environment for every request, each in a thread.
            trust_env=False,
            response_class=_Response,
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

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        timeout_s: float = REQUEST_TIMEOUT_S,
        before_send: Checkpoint | None = None,
        on_answer: Callable[[], None] | None = None,
        on_size: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the decoded response.

        `on_answer` is called when the status line has arrived: the server is done.

        Raises:
            ApiError: the server refused, or there was no usable response (status 0).
        """
        content = None if body is None else (json.dumps(body).encode(), content_type)
        limited = 0
        reset = False
        while True:
            try:
                async with self._slots.taken():
                    if before_send is not None:
                        before_send()
                    return await self._once(
                        method,
                        path,
                        params=params,
                        content=content,
                        timeout_s=timeout_s,
                        on_answer=on_answer,
                        on_size=on_size,
                    )
            except _StaleConnection as problem:
                if reset:
                    raise ApiError(0, "ConnectionReset", str(problem)) from problem
                reset = True
            except ApiError as problem:
                if not self._retries_429 or not _is_overload(problem):
                    raise
                self._slots.pause(problem.retry_after_s)
                limited += 1
                if limited > self._retries_429:
                    raise

    async def _once(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None,
        content: tuple[bytes, str] | None,
        timeout_s: float,
        on_answer: Callable[[], None] | None,
        on_size: Callable[[int], None] | None,
    ) -> dict[str, Any]:
        what = f"{method} {path}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._opened(method, path, params, content) as response,
            ):
                if on_answer is not None:
                    on_answer()
                date = response.headers.get("Date")
                if date and self.on_date is not None:
                    self.on_date(date)
                if not 200 <= response.status <= 299:
                    raise await _failure(response)
                answer = await read_bounded(response.content)
        except TimeoutError as problem:
            raise ApiError(0, "Timeout", f"no response to {what} in {timeout_s:g} s") from problem
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as problem:
            raise _StaleConnection(f"{what}: {problem}") from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise BrokenAnswer(f"{what}: {problem}") from problem
        if on_size is not None:
            on_size(len(answer))
        return decoded(answer)

    async def read(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """Return an object; None if it does not exist, a stand-in if it is too large to be read.

        Raises:
            ApiError: as `request`.
        """
        try:
            return await self.request("GET", resource.path(namespace, name))
        except NotTaken as problem:
            return stand_in(problem.message, name=name, namespace=namespace)
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
        page_size: int = PAGE,
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the pages of a list, one at a time; a page is freed before the next is read.

        A page has fewer objects the larger they are, and `page_size` at most. A single object that is
        too large is replaced by a stand-in.

        Raises:
            ApiError: as `request`; 410 if the list expired between two pages.
        """
        params: dict[str, str] = {}
        limit, sizes = min(FIRST_PAGE, page_size), [0]
        if selector:
            params["labelSelector"] = selector
        if field_selector:
            params["fieldSelector"] = field_selector
        while True:
            params["limit"] = str(limit)
            try:
                page = await self.request(
                    "GET",
                    resource.path(namespace),
                    params=params,
                    timeout_s=LIST_TIMEOUT_S,
                    on_size=sizes.append,
                )
            except NotTaken as problem:
                if limit > 1:
                    limit = max(1, limit // GROWTH)
                    continue
                page = page_of_one(problem)
                sizes.append(ANSWER_BYTES)
            following = text(as_map(page.get("metadata")).get("continue"), CONTINUE_LIMIT)
            limit = next_limit(limit, page_size, len(maps(page.get("items"))), sizes.pop())
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
        field_selector: str = "",
        server_timeout_s: int,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Return the lines of a watch that starts just after `resource_version`.

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
        if field_selector:
            params["fieldSelector"] = field_selector
        await self._slots.pause_over()
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(LIST_TIMEOUT_S):
                    response = await stack.enter_async_context(
                        self._opened("GET", resource.path(namespace), params)
                    )
                    if response.status != 200:
                        raise await _failure(response)
                yield bounded_lines(response.content)
        except TimeoutError as problem:
            raise ApiError(
                0, "Timeout", f"no response to a watch of {resource.plural}"
            ) from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise ApiError(0, "WatchCut", f"watch of {resource.plural}: {problem}") from problem

    @contextlib.asynccontextmanager
    async def _opened(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        content: tuple[bytes, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request once and return the response, of any status.

        Raises:
            ApiError: our credentials cannot be read.
        """
        assert self._session is not None, "use the client as an async context manager"  # noqa: S101
        try:
            identity, tls = self._credentials.headers(), self._credentials.tls()
        except OSError as problem:
            raise ApiError(0, "NoCredentials", f"{method} {path}: {problem}") from problem
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # compressing a long list costs both sides more than it saves
            "User-Agent": self._user_agent,
            **identity,
        }
        if content is not None:
            headers["Content-Type"] = content[1]
        async with self._session.request(
            method,
            f"{self._credentials.url}{path}",
            params=params,
            data=None if content is None else content[0],
            headers=headers,
            ssl=tls,
            server_hostname=self._credentials.server_name,
            proxy=self._credentials.proxy,
            allow_redirects=False,  # another server must not get the token
        ) as response:
            try:
                yield response
            finally:
                if not response.content.at_eof():
                    response.close()


async def _failure(response: aiohttp.ClientResponse) -> ApiError:
    """Return the error for a response other than 2xx."""
    body = await read_start(response.content, FAILURE_BYTES)
    return parse_failure(response.status, body, response.headers.get("Retry-After"))


def _is_overload(problem: ApiError) -> bool:
    """Return whether the API server itself asked for fewer requests.

    A 429 from a webhook concerns one object and must not pause the requests for all others.
    """
    return problem.status == 429 and not problem.is_from_admission


class _Response(aiohttp.ClientResponse):
    """A response whose connection is aborted if it is closed before its end, or while it is waited for.

    A watch has no end. An orderly end of TLS would wait for the server, beyond the end of the loop.
    """

    def close(self) -> None:
        """Abort the connection."""
        connection = self.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        super().close()


class _StaleConnection(Exception):
    """A connection that broke before the response, as a kept-alive one does if the server closed it."""
