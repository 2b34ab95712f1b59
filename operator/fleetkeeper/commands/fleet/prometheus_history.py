"""Range queries of a Prometheus whose URL the user gives, with limits on time and size."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import requests
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from urllib3.exceptions import HTTPError

from fleetkeeper.adapters.prometheus.address import hidden, parse_address, secret_forms

ANSWER_BYTES: Final = 128 * 1024 * 1024
CHUNK_BYTES: Final = 65_536


class HistoryError(Exception):
    """The lack of an answer. The message has the reason, without credentials."""


class PrometheusHistory:
    """A reader of one Prometheus. No redirect is followed, and no proxy of the environment is used."""

    def __init__(self, url: str, *, deadline_s: float, answer_bytes: int = ANSWER_BYTES) -> None:
        """Take the limits of each query.

        Raises:
            ValueError: the URL is unusable; the message does not repeat it.
        """
        self._address = parse_address(url)
        self._deadline_s = deadline_s
        self._answer_bytes = answer_bytes

    def range(self, query: str, begin: float, end: float, step_s: float) -> list[Mapping[str, Any]]:
        """Return the series of a range query; times are seconds since 1970.

        Raises:
            HistoryError: Prometheus did not answer, or refused.
        """
        first, last = (datetime.fromtimestamp(at, UTC) for at in (begin, end))
        address, until = self._address, time.monotonic() + self._deadline_s
        try:
            with requests.Session() as session:
                session.trust_env = False
                session.max_redirects = 0
                session.hooks["response"].append(
                    partial(_read, most=self._answer_bytes, until=until)
                )
                client = PrometheusConnect(
                    address.url, session=session, auth=address.auth, timeout=self._deadline_s
                )
                return list(client.custom_query_range(query, first, last, f"{step_s:.0f}s"))
        except (
            PrometheusApiClientException,
            HTTPError,
            LookupError,
            OSError,  # requests' own errors too
            TypeError,
            ValueError,
        ) as problem:
            text = hidden(f"{type(problem).__name__}: {problem}", secret_forms(address.auth))[:300]
            raise HistoryError(f"Prometheus did not answer: {text}") from None


def _read(response: requests.Response, *_: object, most: int, until: float, **__: object) -> None:
    """Read the body of a response within the limits; requests has none of its own."""
    body = bytearray()
    with closing(response.raw) as raw:
        while chunk := raw.read1(CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > most:
                raise ValueError(f"the response is larger than {most} bytes")
            if time.monotonic() > until:
                raise ValueError("the response did not end before the deadline")
    response.raw = io.BytesIO(body)
