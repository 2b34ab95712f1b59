"""Range queries of a Prometheus whose URL the user gives, with limits on time and size."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import requests
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from urllib3.exceptions import HTTPError

from fleetkeeper.adapters.prometheus.session import (
    BoundedSession,
    PrometheusError,
    hidden,
    parse_address,
    secret_forms,
)

ANSWER_BYTES: Final = 128 * 1024 * 1024


class HistoryError(Exception):
    """The lack of an answer. The message has the reason, without credentials."""


class PrometheusHistory:
    """A reader of one Prometheus. No redirect is followed, and no proxy of the environment is used."""

    def __init__(self, url: str, *, deadline_s: float, answer_bytes: int = ANSWER_BYTES) -> None:
        """Take the limits of each query.

        Raises:
            ValueError: the URL is unusable; the message does not repeat it.
        """
        address = parse_address(url)
        self._deadline_s = deadline_s
        self._answer_bytes = answer_bytes
        self._secrets = secret_forms(address.auth, "")
        self._session = BoundedSession(time.monotonic)
        self._client = PrometheusConnect(address.url, session=self._session, auth=address.auth)

    def range(self, query: str, begin: float, end: float, step_s: float) -> list[Mapping[str, Any]]:
        """Return the series of a range query; times are seconds since 1970.

        Raises:
            HistoryError: Prometheus did not answer, or refused.
        """
        first, last = (datetime.fromtimestamp(at, UTC) for at in (begin, end))
        self._session.set_bounds(time.monotonic() + self._deadline_s, self._answer_bytes)
        try:
            rows = self._client.custom_query_range(query, first, last, f"{step_s:.0f}s")
        except (
            PrometheusApiClientException,
            PrometheusError,
            requests.RequestException,
            HTTPError,
            LookupError,
            ValueError,
        ) as problem:
            text = hidden(f"{type(problem).__name__}: {problem}", self._secrets)[:300]
            raise HistoryError(f"Prometheus did not answer: {text}") from None
        return list(rows)
