"""Reader of the engines' metrics in Prometheus: about ten queries per tick for all services together.

The queries return raw series and the time of each scrape; the control loop computes rates. All queries
of a tick are evaluated at one instant, so a pod's values belong to one scrape. Responses are untrusted:
their size, time, shape and every number are bounded. A failed query costs only its own values, and one
with too large a result is repeated for parts of the fleet.

A thousand services have a hundred thousand series per tick. So series carry only the labels that tell
them apart, and each response is distributed and freed while the next is in progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import requests
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.util.retry import Retry

from fleetkeeper.adapters.prometheus.answers import Fan, PodKey, PrometheusReading
from fleetkeeper.adapters.prometheus.queries import NAMESPACES_TEXT, Query, queries_for
from fleetkeeper.adapters.prometheus.session import (
    BoundedSession,
    PrometheusError,
    TooMuch,
    hidden,
    parse_address,
    secret_forms,
)
from fleetkeeper.autoscale.signals.histogram_edges import Edges

ANSWER_BYTES: Final = 4 * 1024 * 1024
"""Limit of a response, plus POD_BYTES per pod: it may contain series of other fleets."""
POD_BYTES: Final = 8 * 1024
"""Limit per pod: a query returns at most 15 series of a pod, and a series takes about 200 bytes."""
PARTS: Final = 32
"""How often a query with too large a result is repeated for parts of the fleet. This is enough to
isolate one namespace of ten thousand."""
UNPROCESSABLE: Final = "HTTP Status Code 422 "
"""Start of the client's message if a query could not be executed: too many samples, or a timeout."""


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
    retries: int = 2
    parallel: int = 4
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    selector: str = ""
    batch_selector: str = ""


@dataclass(frozen=True, slots=True)
class _Miss:
    """A failed query: for which namespaces, and why."""

    query: Query
    namespaces: frozenset[str]
    problem: str


def answer_bytes(pods: int, most: int) -> int:
    """Return the maximum size of a response about this many pods; never more than `most`."""
    return min(most, ANSWER_BYTES + POD_BYTES * pods)


class Prometheus:
    """One Prometheus server. Blocking work runs in its own threads."""

    def __init__(self, settings: PrometheusSettings, monotonic: Callable[[], float]) -> None:
        """Use `monotonic`, in seconds that never jump, for the deadline."""
        self._settings = settings
        self._monotonic = monotonic
        self._address = parse_address(settings.url)
        self._secrets = secret_forms(self._address.auth, "")
        self._session = BoundedSession(monotonic)
        self._threads = ThreadPoolExecutor(settings.parallel, thread_name_prefix="prometheus")
        retry = Retry(
            total=settings.retries,
            read=0,  # a retry after a timeout would block the thread once more
            backoff_factor=0.1,
            status_forcelist=(502, 503, 504),
            respect_retry_after_header=False,
            raise_on_status=False,
        )
        url = self._address.url
        self._client = PrometheusConnect(
            url, retry=retry, session=self._session, auth=self._address.auth
        )
        self._session.mount(url, HTTPAdapter(max_retries=retry, pool_maxsize=settings.parallel))

    def close(self) -> None:
        """Close connections and threads, without waiting for queries in progress."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._session.close()

    async def observe_samples(
        self, pods: Mapping[PodKey, Edges], now: float, *, step_class: str = ""
    ) -> PrometheusReading:
        """Return the newest sample of each of these pods that Prometheus knows.

        Raises:
            PrometheusError: a required query failed for all pods, so none has a sample.
        """
        if not pods:
            return PrometheusReading({})
        self._refresh()
        tick = _Tick(
            now=now,
            deadline=self._monotonic() + self._settings.deadline_s,
            size=answer_bytes(len(pods), self._settings.response_bytes),
            namespaces=tuple(sorted({namespace for namespace, _ in pods})),
            fan=Fan(pods),
        )
        queries = queries_for(
            set(pods.values()),
            step_class=step_class,
            selector=self._settings.selector,
            batch_selector=self._settings.batch_selector,
        )
        loop = asyncio.get_running_loop()
        jobs = {
            loop.run_in_executor(self._threads, self._ask, query, tick): query for query in queries
        }
        try:
            await asyncio.wait(jobs, timeout=self._settings.deadline_s + 0.5)
        finally:
            late = [job for job in jobs if not job.done()]
            for job in late:
                job.cancel()
        misses = [miss for job in jobs if job not in late for miss in job.result()]
        silence = f"no response within {self._settings.deadline_s:.0f} s"
        misses += [_Miss(jobs[job], frozenset(tick.namespaces), silence) for job in late]
        return tick.reading(misses)

    def _refresh(self) -> None:
        """Read the credentials and the CA for this tick."""
        settings = self._settings
        headers = dict(settings.headers)
        if settings.token_file is not None:
            token = _read_token(settings.token_file)
            self._secrets = secret_forms(self._address.auth, token)
            headers["Authorization"] = f"Bearer {token}"
            self._client.auth = None
        self._client.headers = headers
        if settings.ca_file is not None:
            self._session.verify = str(settings.ca_file)

    def _ask(self, query: Query, tick: _Tick) -> list[_Miss]:
        """Run a query, in parts if the whole result is too large; return what failed."""
        left = PARTS

        def ask(namespaces: Sequence[str], scope: Sequence[str]) -> list[_Miss]:
            nonlocal left
            try:
                tick.fan.take(query.name, self._query(query.text(scope), tick))
            except TooMuch as problem:
                if len(namespaces) == 1 or left <= 0:
                    return [_Miss(query, frozenset(namespaces), str(problem))]
            except PrometheusError as problem:
                return [_Miss(query, frozenset(namespaces), str(problem))]
            else:
                return []
            left -= 2
            middle = len(namespaces) // 2
            halves = namespaces[:middle], namespaces[middle:]
            return [miss for half in halves for miss in ask(half, half)]

        names = tick.namespaces
        return ask(names, names if len("|".join(names)) <= NAMESPACES_TEXT else ())

    def _query(self, text: str, tick: _Tick) -> list[Any]:
        """Return the result of one instant query, checked for shape.

        Errors are raised without their causes, whose texts and frames may contain credentials.
        """
        self._session.set_bounds(tick.deadline, tick.size)
        try:
            rows = self._client.custom_query(text, params={"time": f"{tick.now:.3f}"})
        except PrometheusApiClientException as error:
            kind = TooMuch if str(error).startswith(UNPROCESSABLE) else PrometheusError
            raise kind(f"error response: {self._text_of(error)}") from None
        except (requests.JSONDecodeError, UnicodeError):
            raise PrometheusError("unusable response: not JSON") from None
        except (requests.RequestException, HTTPError) as error:
            raise PrometheusError(f"unreachable: {self._text_of(error)}") from None
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
            raise PrometheusError(f"unusable response: {self._text_of(error)}") from None
        if not isinstance(rows, list):
            raise PrometheusError("unusable response: not a list of series")
        return rows

    def _text_of(self, error: Exception) -> str:
        """Return the error as text, without the query that urllib3 puts before the reason."""
        reason = getattr(error.args[0] if error.args else None, "reason", None) or error
        return hidden(f"{type(reason).__name__}: {reason}", self._secrets)[:200]


@dataclass(frozen=True, slots=True)
class _Tick:
    """The state that all queries of one tick share."""

    now: float
    deadline: float
    size: int
    namespaces: tuple[str, ...]
    fan: Fan

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


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise PrometheusError(f"token file {path}: {error.strerror}") from None
    except ValueError:
        raise PrometheusError(f"token file {path}: not text") from None
