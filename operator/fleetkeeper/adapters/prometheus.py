"""Reads the engines' metrics from Prometheus: about ten queries a tick for all services together.

Raw series come back, a scrape's own time with them; rates are made by the control loop. All queries
of a tick are evaluated at one instant, so a pod's values belong to one scrape. What Prometheus
answers is hostile input: size, time, shape and every number are bounded.

A thousand services are a hundred thousand series a tick, so series bear the labels that tell them
apart and no others, and each answer is fanned out and let go while the next is under way.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import requests
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from fleetkeeper.plan.control.edges import Edges
from fleetkeeper.plan.control.exposed import STEP_TERMS, PodSeries
from fleetkeeper.plan.control.samples import PodSample, Source

PodKey = tuple[str, str]
"""Namespace and name of a pod."""

SERVICE_LABEL: Final = "inference_service"
BY: Final = "namespace, pod"
OURS: Final = f'{SERVICE_LABEL}!=""'
CHUNK_BYTES: Final = 65_536
LEAST_S: Final = 0.01
"""With less time left there is none."""


class PrometheusError(Exception):
    """Prometheus did not give a usable answer; the message says what was wrong."""


@dataclass(frozen=True, slots=True)
class PrometheusSettings:
    """Where Prometheus is and how far it is trusted.

    `ca_file` and `token_file` are read anew at each tick (they rotate); `deadline_s` holds for all
    queries of a tick together, `response_bytes` for each answer.
    """

    url: str
    ca_file: Path | None = None
    token_file: Path | None = None
    deadline_s: float = 4.0
    response_bytes: int = 64 * 1024 * 1024
    retries: int = 2
    parallel: int = 4
    headers: Mapping[str, str] = field(default_factory=dict)


class BoundedSession(requests.Session):
    """A session whose answers end at a size and a deadline, without redirects or proxies of the environment."""

    def __init__(self, response_bytes: int, monotonic: Callable[[], float]) -> None:
        super().__init__()
        self.trust_env = False
        self.max_redirects = 0
        self._due = threading.local()
        self._response_bytes = response_bytes
        self._monotonic = monotonic

    def set_deadline(self, deadline: float) -> None:
        """Until when this thread's requests may take; those of other threads keep theirs."""
        self._due.at = deadline

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:  # noqa: ANN401 - requests' own signature
        """One request, its body read within the bounds.

        Raises:
            PrometheusError: when the body is larger or slower than allowed, or a redirect.
        """
        if self._left_s() <= LEAST_S:
            raise PrometheusError("no answer before the deadline")
        kwargs |= {"stream": True, "allow_redirects": False, "timeout": self._left_s()}
        response = super().request(*args, **kwargs)
        if response.is_redirect:
            response.close()
            raise PrometheusError(f"redirects to {response.headers.get('Location', '')[:200]!r}")
        body = bytearray()
        while chunk := response.raw.read1(CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > self._response_bytes:
                response.close()
                raise PrometheusError(f"an answer is larger than {self._response_bytes} bytes")
            if self._left_s() <= LEAST_S:
                response.close()
                raise PrometheusError("an answer did not end before the deadline")
        response._content = bytes(body)  # noqa: SLF001 - requests has no public way to bound a body
        return response

    def _left_s(self) -> float:
        return max(LEAST_S, float(getattr(self._due, "at", 0.0)) - self._monotonic())


def label_value(value: str) -> str:
    r"""A label's value as it stands between double quotes in PromQL: backslash, quote, newline escaped."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def bucket_matcher(edges: Iterable[float]) -> str:
    """The values of `le` for some edges: "1" and "1.0" both, for releases differ."""
    texts = {text for edge in edges for text in (f"{edge:g}", repr(float(edge)), str(edge))}
    return "|".join(sorted(text.replace(".", "\\\\.").replace("+", "\\\\+") for text in texts))


def _named(names: str, by: str = "", more: str = "") -> str:
    labels = f"{BY}, {by}" if by else BY
    return f'max by (__name__, {labels}) ({{__name__=~"fleetkeeper_({names})", {OURS}{more}}})'


def queries_for(edges: Iterable[Edges], *, step_class: str = "") -> tuple[str, ...]:
    """The queries of one tick, that for the times of scrapes first; their number does not depend on that of services.

    `max by` rather than `sum by`: a pod scraped by two jobs counts once. `step_class`: the class of
    steps whose sums for the step-time model are asked for, if any.
    """
    listed = list(edges)
    waits = bucket_matcher({edge.queue_wait_s for edge in listed})
    steps = bucket_matcher({edge.batch_time_s for edge in listed})
    queries = (
        f"max by ({BY}) (timestamp(fleetkeeper_kv_capacity_tokens{{{OURS}}}))",
        _named("queue_wait_seconds_(count|sum)", "tier"),
        _named("queue_wait_seconds_bucket", "tier, le", f', le=~"{waits}"'),
        _named("batch_time_seconds_bucket", "le", f', le=~"{steps}"'),
        _named(
            "batch_time_seconds_(count|sum)"
            "|(steps|schedule_calls|prompt_tokens|generation_tokens|preemptions)_total"
        ),
        _named("arrivals(_squared)?_total", "tier"),
        _named("waiting|running|oldest_wait_seconds", "tier"),
        _named("limit_(sequences|tokens|generation)", "kind", ', kind=~"effective|applied"'),
        _named(
            "kv_(capacity|resident)_tokens|memory_(used|peak|fragmentation)_ratio|live_limits_supported"
        ),
    )
    if not step_class:
        return queries
    terms, of_class = "|".join(STEP_TERMS[step_class]), f', step_class="{step_class}"'
    return (*queries, _named(f"step_model_({terms})_total", "step_class", of_class))


class Prometheus:
    """One Prometheus server. Blocking work runs in threads of its own."""

    def __init__(self, settings: PrometheusSettings, monotonic: Callable[[], float]) -> None:
        """`monotonic` gives seconds that never jump, for the deadline."""
        self._settings = settings
        self._monotonic = monotonic
        self._session = BoundedSession(settings.response_bytes, monotonic)
        self._threads = ThreadPoolExecutor(settings.parallel, thread_name_prefix="prometheus")
        retry = Retry(
            total=settings.retries,
            read=0,  # an answer that did not come in time would hold its thread once more
            backoff_factor=0.1,
            status_forcelist=(502, 503, 504),
            respect_retry_after_header=False,
            raise_on_status=False,
        )
        self._client = PrometheusConnect(
            settings.url.rstrip("/"), retry=retry, session=self._session
        )
        self._session.mount(
            settings.url.rstrip("/"), HTTPAdapter(max_retries=retry, pool_maxsize=settings.parallel)
        )

    def close(self) -> None:
        """Ends connections and threads; a query under way is waited for by nobody."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._session.close()

    async def observe_samples(
        self, pods: Mapping[PodKey, Edges], now: float, *, step_class: str = ""
    ) -> dict[PodKey, PodSample]:
        """The newest sample of each of these pods that Prometheus knows.

        Raises:
            PrometheusError: when any query failed, or the deadline passed.
        """
        if not pods:
            return {}
        self._refresh()
        deadline = self._monotonic() + self._settings.deadline_s
        times, *others = queries_for(set(pods.values()), step_class=step_class)
        fan = Fan(pods)

        def ask(query: str, take: Callable[[list[Any]], None]) -> None:
            take(self._query(query, now, deadline))

        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(self._threads, ask, times, fan.take_times)]
        jobs += [loop.run_in_executor(self._threads, ask, query, fan.take) for query in others]
        try:
            async with asyncio.timeout(self._settings.deadline_s + 0.5):
                await asyncio.gather(*jobs)
        except TimeoutError:
            raise PrometheusError(f"no answer within {self._settings.deadline_s:.0f} s") from None
        finally:
            for job in jobs:
                job.cancel()
        return fan.samples()

    def _refresh(self) -> None:
        """Credentials and CA for this tick."""
        settings = self._settings
        headers = dict(settings.headers)
        if settings.token_file is not None:
            headers["Authorization"] = f"Bearer {_read_token(settings.token_file)}"
        self._client.headers = headers
        if settings.ca_file is not None:
            self._session.verify = str(settings.ca_file)

    def _query(self, query: str, now: float, deadline: float) -> list[Any]:
        """One instant query, checked for shape."""
        self._session.set_deadline(deadline)
        try:
            rows = self._client.custom_query(query, params={"time": f"{now:.3f}"})
        except PrometheusApiClientException as error:
            raise PrometheusError(f"answers {str(error)[:200]}") from error
        except requests.RequestException as error:
            raise PrometheusError(f"cannot be reached: {str(error)[:200]}") from error
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
            raise PrometheusError(f"gives no usable answer: {str(error)[:200]}") from error
        if not isinstance(rows, list):
            raise PrometheusError("gives no list of series")
        return rows


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise PrometheusError(f"token file {path}: {error.strerror}") from error


class Fan:
    """Fans the answers of one tick out to their pods, as they come, from several threads.

    Rows that are no series, and series of pods not asked for, are dropped. NaN is kept: it is judged
    later.
    """

    def __init__(self, pods: Mapping[PodKey, Edges]) -> None:
        self._series = {pod: PodSeries(edges) for pod, edges in pods.items()}
        self._times: dict[PodKey, float] = {}
        self._turn = threading.Lock()

    def take_times(self, rows: list[Any]) -> None:
        """The answer to the query for the times of scrapes."""
        for pod, _, time_s in _parsed(rows):
            if pod in self._series:
                self._times[pod] = time_s

    def take(self, rows: list[Any]) -> None:
        """The answer to any other query."""
        with self._turn:
            for pod, labels, value in _parsed(rows):
                series = self._series.get(pod)
                if series is None:
                    continue
                try:
                    series.add(labels.get("__name__", ""), labels, value)
                except TypeError:  # a label that is no text
                    continue

    def samples(self) -> dict[PodKey, PodSample]:
        """A sample of every pod that has a time and at least one series that we know."""
        return {
            pod: series.sample(pod[1], self._times[pod], Source.PROMETHEUS)
            for pod, series in self._series.items()
            if pod in self._times and not series.is_empty
        }


def _parsed(rows: list[Any]) -> Iterator[tuple[PodKey, Mapping[str, str], float]]:
    """Pod, labels and value of each row that is a series."""
    for row in rows:
        try:
            labels, value = row["metric"], row["value"]
            if type(value) is not list or type(labels) is not dict:
                continue
            pod, number = (labels["namespace"], labels["pod"]), float(value[1])
            hash(pod)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            continue
        yield pod, labels, number
