"""HTTP client of the API server: one session, reused connections, few in flight, bounded waits.

Only two failures are retried here: a request on a kept-alive connection that the server had closed, and
429 after the number of seconds in the response. All other failures go to the caller, whose queue backs
off: the retries of two layers would multiply.

A 429 pauses the whole client: the server asked for fewer requests, so all others wait too, without
taking a slot. Requests that must not wait (for the lease) use a separate client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from fleetkeeper.adapters.kubernetes.bounds import (
    ANSWER_BYTES,
    FIRST_PAGE,
    GROWTH,
    NotTaken,
    bounded_lines,
    decoded,
    next_limit,
    page_of_one,
    read_bounded,
)
from fleetkeeper.adapters.kubernetes.errors import (
    ApiError,
    BrokenAnswer,
    parse_failure,
    problem_of,
)
from fleetkeeper.adapters.kubernetes.reading import as_map, maps, stand_in, text
from fleetkeeper.adapters.kubernetes.resources import Resource
from fleetkeeper.adapters.kubernetes.slots import RequestSlots
from fleetkeeper.reconcile.types import WriteProblem

REQUEST_TIMEOUT_S: Final = 4.0
"""Together with the renewal deadline of 10 s: a write is applied within 14 s of a renewal, or never."""
LIST_TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 24
"""Concurrent requests. Comparable operators are slow with one worker or 20 requests a second."""
CONTINUE_LIMIT: Final = 16 * 1024
RETRIES_429: Final = 3
CONNECT_TIMEOUT_S: Final = 4.0
USER_AGENT: Final = "fleetkeeper"

Checkpoint = Callable[[], None]
"""Called just before each sending of a request, retries included; raises to prevent it."""


class AnswerObserver(Protocol):
    """A function that is called when the status line of a response arrived: the server is done."""

    def __call__(self) -> None:
        """Handle a response whose headers have arrived, but not its body."""


class KubernetesClient:
    """A client of one API server. The tasks of one event loop can share it."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        in_flight: int = IN_FLIGHT,
        retries_429: int = RETRIES_429,
    ) -> None:
        """With `retries_429=0` a 429 is raised at once and does not pause other requests."""
        self._api = ApiClient(configuration)
        self._api.user_agent = USER_AGENT
        self._slots = RequestSlots(in_flight)
        self._retries_429 = retries_429
        self.on_date: Callable[[str], None] | None = None
        """Called with the `Date` header of every response: the API server's time."""

    async def close(self) -> None:
        """Close all connections."""
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
        on_size: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the decoded response.

        Raises:
            ApiError: the server refused, or there was no usable response (status 0).
        """
        url = self._url(path, params)
        limited = 0
        reset = False
        while True:
            try:
                async with self._slots.taken():
                    if before_send is not None:
                        before_send()
                    return await self._once(
                        method,
                        url,
                        body=body,
                        content_type=content_type,
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
        url: str,
        *,
        body: Mapping[str, Any] | None,
        content_type: str,
        timeout_s: float,
        on_answer: AnswerObserver | None,
        on_size: Callable[[int], None] | None,
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
                date = answer.getheader("Date")
                if date and self.on_date is not None:
                    self.on_date(date)
                content = await read_bounded(answer.response)
                if on_size is not None:
                    on_size(len(content))
        except TimeoutError as problem:
            raise ApiError(
                0, "Timeout", f"no response to {method} {url} in {timeout_s} s"
            ) from problem
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as problem:
            raise _StaleConnection(f"{method} {url}: {problem}") from problem
        except aiohttp.ClientError as problem:
            raise BrokenAnswer(f"{method} {url}: {problem}") from problem
        if not 200 <= answer.status <= 299:
            raise parse_failure(answer.status, content, answer.getheader("Retry-After"))
        return decoded(content)

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
        page_size: int = 200,
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
        url = self._url(resource.path(namespace), params)
        answer = None
        await self._slots.pause_over()
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
                        answer.status,
                        await read_bounded(answer.response),
                        answer.getheader("Retry-After"),
                    )
                    raise refused
            yield bounded_lines(answer.response.content)
        except TimeoutError as problem:
            raise ApiError(
                0, "Timeout", f"no response to a watch of {resource.plural}"
            ) from problem
        except aiohttp.ClientError as problem:
            raise ApiError(0, "WatchCut", f"watch of {resource.plural}: {problem}") from problem
        finally:
            if answer is not None:
                connection = answer.response.connection
                if connection is not None and connection.transport is not None:
                    # To close would wait for the server's end of TLS, after the session is closed, too.
                    connection.transport.abort()
                answer.response.close()

    def _url(self, path: str, params: dict[str, str] | None) -> str:
        query = f"?{urlencode(params)}" if params else ""
        return f"{self._api.configuration.host}{path}{query}"

    async def _headers(self, content_type: str) -> dict[str, str]:
        """Return new headers for each request: the client refreshes the service account token here."""
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # compressing a long list costs both sides more than it saves
            "Content-Type": content_type,
            "User-Agent": self._api.user_agent,
        }
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        return headers


def _is_overload(problem: ApiError) -> bool:
    """Return whether the API server itself asked for fewer requests.

    A 429 from a webhook concerns one object and must not pause the requests for all others.
    """
    return problem.status == 429 and problem_of(problem) is not WriteProblem.ADMISSION


class _StaleConnection(Exception):
    """A connection that broke before the response, as a kept-alive one does if the server closed it."""
