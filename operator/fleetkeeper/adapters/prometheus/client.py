"""Reader of the engines' metrics in Prometheus: about ten queries per tick for all services together.

The queries return raw series and the time of each scrape; the control loop computes rates. All queries
of a tick are evaluated at one instant, so a pod's values belong to one scrape. Responses are untrusted:
their size, time, shape and every number are bounded. A failed query costs only its own values, and one
with too large a result is repeated for parts of the fleet.

A thousand services have a hundred thousand series per tick. So series carry only the labels that
distinguish them, and each response is distributed and freed while the next is in progress.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from fleetkeeper.adapters.prometheus.address import (
    basic_credentials,
    hidden,
    parse_address,
    secret_forms,
)
from fleetkeeper.adapters.prometheus.answers import Fan, PodKey, PrometheusReading
from fleetkeeper.adapters.prometheus.queries import NAMESPACES_TEXT, Query, queries_for
from fleetkeeper.autoscale.signals.histogram_edges import Edges

ANSWER_BYTES: Final = 4 * 1024 * 1024
"""Limit of a response, plus POD_BYTES per pod: it may contain series of other fleets."""
POD_BYTES: Final = 8 * 1024
"""Limit per pod: a query returns at most 15 series of a pod, and a series takes about 200 bytes."""
PARTS: Final = 32
"""Maximum repetitions of a query with too large a result for parts of the fleet. This is enough to
isolate one namespace of ten thousand."""
PARALLEL: Final = 4
IDLE_S: Final = 1.0
"""Connections end before the next tick, which may have other credentials."""
RETRIES: Final = 2
"""Maximum repetitions of a query without a connection, or with a status in `BUSY`."""
RETRY_S: Final = 0.1
BUSY: Final = frozenset({502, 503, 504})
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
UNPROCESSABLE: Final = 422
"""Status of a query that could not be executed: too many samples, or a timeout."""
CHUNK_BYTES: Final = 65_536
SMALL_BYTES: Final = 65_536
"""A response up to this size is decoded at once, a larger one in a thread."""
ROWS: Final = 1_000
"""Rows that are distributed before other tasks have a turn: a few milliseconds."""


class PrometheusError(Exception):
    """The lack of a usable response from Prometheus; the message says what was wrong."""


class TooMuch(PrometheusError):
    """A response that is too large. A query for a part of the fleet may succeed."""


@dataclass(frozen=True, slots=True)
class PrometheusSettings:
    """The address, the credentials and the limits of Prometheus.

    `ca_file` and `token_file` are read again at each tick, because they rotate. A token takes
    precedence over a user in `url`. `deadline_s` is the limit of all queries of a tick together,
    `response_bytes` that of each response. `selector` (from `parse_selector`) is added to every query.
    `batch_selector` selects the batch process instead; without one, its metrics are not read.
    """

    url: str = field(repr=False)
    ca_file: Path | None = None
    token_file: Path | None = None
    deadline_s: float = 4.0
    response_bytes: int = 32 * 1024 * 1024
    selector: str = ""
    batch_selector: str = ""


def answer_bytes(pods: int, most: int) -> int:
    """Return the maximum size of a response about this many pods; never more than `most`."""
    return min(most, ANSWER_BYTES + POD_BYTES * pods)


class Prometheus:
    """One Prometheus server.

    Its connector outlives ticks because it looks up the server's name at most once at a time: a name
    server that does not answer takes one thread, not one per tick.
    """

    def __init__(self, settings: PrometheusSettings) -> None:
        self._settings = settings
        self._address = parse_address(settings.url)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),  # the deadline is that of the tick
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def observe_samples(
        self, pods: Mapping[PodKey, Edges], now: float, *, step_class: str = ""
    ) -> PrometheusReading:
        """Return the newest sample of each of these pods that Prometheus knows.

        Raises:
            PrometheusError: a required query failed for all pods, so none has a sample.
        """
        if not pods:
            return PrometheusReading({})
        settings, auth = self._settings, self._address.auth
        headers, token = {"Accept-Encoding": "gzip"}, ""
        if settings.token_file is not None:
            token = _read_token(settings.token_file)
            headers["Authorization"] = f"Bearer {token}"
        elif auth is not None:
            headers["Authorization"] = f"Basic {basic_credentials(auth)}"
        queries = queries_for(
            set(pods.values()),
            step_class=step_class,
            selector=settings.selector,
            batch_selector=settings.batch_selector,
        )
        get = partial(
            self._session.get,
            f"{self._address.url}/api/v1/query",
            headers=headers,
            ssl=_trust(settings.ca_file),
            allow_redirects=False,
        )
        tick = _Tick(
            get=get,
            now=now,
            deadline=asyncio.get_running_loop().time() + settings.deadline_s,
            silence=f"no response within {settings.deadline_s:.0f} s",
            size=answer_bytes(len(pods), settings.response_bytes),
            secrets=secret_forms(auth, token),
            namespaces=tuple(sorted({namespace for namespace, _ in pods})),
            fan=Fan(pods),
        )
        misses = await asyncio.gather(*map(tick.ask, queries))
        return tick.reading([miss for found in misses for miss in found])


@dataclass(frozen=True, slots=True)
class _Miss:
    """A failed query: for which namespaces, and why."""

    query: Query
    namespaces: frozenset[str]
    problem: str


@dataclass(frozen=True, slots=True)
class _Tick:
    """The queries of one tick, and what they share."""

    get: Callable[..., AbstractAsyncContextManager[aiohttp.ClientResponse]]
    now: float
    deadline: float
    silence: str
    size: int
    secrets: frozenset[str]
    namespaces: tuple[str, ...]
    fan: Fan
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL))

    async def ask(self, query: Query) -> list[_Miss]:
        """Run a query, in parts if the whole result is too large; return what failed."""
        names: Sequence[str] = self.namespaces
        parts = [(names, names if len("|".join(names)) <= NAMESPACES_TEXT else ())]
        left, misses = PARTS, []
        async with self.slots:
            while parts:
                namespaces, scope = parts.pop()
                try:
                    await self._take(query.name, await self._rows(query.text(scope)))
                except PrometheusError as problem:
                    if isinstance(problem, TooMuch) and len(namespaces) > 1 and left > 0:
                        left -= 2
                        middle = len(namespaces) // 2
                        halves = namespaces[middle:], namespaces[:middle]
                        parts += [(half, half) for half in halves]
                        continue
                    text = hidden(str(problem), self.secrets)[:200]
                    misses.append(_Miss(query, frozenset(namespaces), text))
        return misses

    async def _take(self, name: str, rows: list[Any]) -> None:
        """Distribute the result of a query without a long turn of the event loop."""
        for start in range(0, len(rows), ROWS):
            self.fan.take(name, rows[start : start + ROWS])
            await asyncio.sleep(0)

    async def _rows(self, text: str) -> list[Any]:
        """Return the result of one instant query, checked for shape.

        Raises:
            PrometheusError: there is no usable response; the message may contain secrets.
        """
        try:
            async with asyncio.timeout_at(self.deadline):
                body = await self._body({"query": text, "time": f"{self.now:.3f}"})
                if len(body) <= SMALL_BYTES:
                    return _decoded(body)
                return await asyncio.to_thread(_decoded, body)
        except TimeoutError:
            raise PrometheusError(self.silence) from None
        except aiohttp.ClientResponseError as error:  # its text has the query
            raise PrometheusError(f"unreachable: {error.message}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise PrometheusError(f"unreachable: {type(error).__name__}: {error}") from None

    async def _body(self, params: Mapping[str, str]) -> bytearray:
        """Return the body of the response, after retries."""
        left = RETRIES
        while True:
            try:
                async with self.get(params=params) as response:
                    if response.status not in BUSY or not left:
                        return await self._read(response)
            except aiohttp.ClientConnectorError:
                if not left:
                    raise
            left -= 1
            await asyncio.sleep(RETRY_S)

    async def _read(self, response: aiohttp.ClientResponse) -> bytearray:
        if response.status in REDIRECTS:
            raise PrometheusError(f"redirect to {_host_of(response)!r} refused")
        body = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            body += chunk
            if len(body) > self.size:
                raise TooMuch(f"response is larger than {self.size} bytes")
        if response.status != 200:
            kind = TooMuch if response.status == UNPROCESSABLE else PrometheusError
            raise kind(
                f"error response: HTTP status {response.status}: {body.decode(errors='replace')}"
            )
        return body

    def reading(self, misses: Sequence[_Miss]) -> PrometheusReading:
        """Return the samples of the successful queries.

        Raises:
            PrometheusError: a required query failed for all namespaces.
        """
        required = [miss for miss in misses if miss.query.required]
        incomplete = {namespace for miss in required for namespace in miss.namespaces}
        if incomplete.issuperset(self.namespaces):
            raise PrometheusError(required[0].problem)
        problems = tuple(dict.fromkeys(f"{miss.query.name}: {miss.problem}" for miss in misses))
        return self.fan.reading(incomplete, problems)


def _host_of(redirect: aiohttp.ClientResponse) -> str:
    """Return where a redirect leads, without the rest of its URL, which may contain credentials."""
    try:
        return str(urlsplit(redirect.headers.get("Location", "")).hostname)[:200]
    except ValueError:
        return ""


def _decoded(body: bytearray) -> list[Any]:
    try:
        # The decoder holds the interpreter's lock. A call of Python per object releases it in between.
        rows = json.loads(body, object_hook=lambda found: found)["data"]["result"]
    except (ValueError, RecursionError):
        raise PrometheusError("unusable response: not JSON") from None
    except (LookupError, TypeError):
        rows = None
    if not isinstance(rows, list):
        raise PrometheusError("unusable response: not a list of series")
    return rows


def _trust(ca_file: Path | None) -> ssl.SSLContext | bool:
    """Return what verifies the server: the CA of the settings, or the system's."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        raise PrometheusError(f"CA file {ca_file}: {error.strerror}") from None


def _read_token(path: Path) -> str:
    try:
        token = path.read_bytes().strip().decode(errors="replace")
    except OSError as error:
        raise PrometheusError(f"token file {path}: {error.strerror}") from None
    if not (token.isascii() and token.isprintable()):
        raise PrometheusError(f"token file {path}: not text")
    return token
