"""Bounded reads of the API server with the rights of the user. A failed read is an exception with its reason."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fleetkeeper.fleet.pages import read_pages
from fleetkeeper_kube.bounds import decoded
from fleetkeeper_kube.errors import ApiError

TIMEOUT_S: Final = 10.0
"""The wait for a connection, and for the next bytes."""
READ_S: Final = 60.0
"""The longest that one response may take."""
OBJECT_BYTES: Final = 16 * 1024 * 1024
MAX_OBJECTS: Final = 2000
"""The most objects of a list; a page may be read up to five times until all its objects are decoded."""


class ReadError(Exception):
    """A read failed; the message is the reason."""


class Reader:
    """A reader of API paths. It stops asking an API server that does not answer."""

    def __init__(self, api: Any) -> None:  # noqa: ANN401 - kubernetes has no types
        self._api = api
        self._is_lost = False
        self.host = str(api.configuration.host)

    def get(self, path: str, **query: str | int) -> dict[str, Any]:
        """Return a JSON object.

        Raises:
            ReadError: It could not be read.
        """
        content, is_cut = self.content(path, OBJECT_BYTES, **query)
        if is_cut:
            raise ReadError(f"larger than {OBJECT_BYTES} bytes")
        try:
            return decoded(content)
        except ApiError as problem:
            raise ReadError(problem.message) from None

    def list(self, path: str, **query: str | int) -> tuple[list[dict[str, Any]], bool]:
        """Return the objects of a list, and whether there are more than the bound.

        Raises:
            ReadError: A page could not be read.
        """
        found: list[dict[str, Any]] = []

        def fetch(page: dict[str, str | int]) -> bytes:
            content, is_cut = self.content(path, OBJECT_BYTES, **query, **page)
            if is_cut:
                raise ReadError(f"larger than {OBJECT_BYTES} bytes")
            return content

        try:
            for page in read_pages(fetch):
                if len(found) >= MAX_OBJECTS:
                    return found, True
                kind = str(page.get("kind", "")).removesuffix("List")
                version = page.get("apiVersion")
                # The items of a list have no kind of their own.
                found += [
                    {"apiVersion": version, "kind": kind, **item}
                    for item in page.get("items") or ()
                ]
        except ApiError as problem:
            raise ReadError(problem.message) from None
        return found, False

    def content(self, path: str, max_bytes: int, **query: str | int) -> tuple[bytes, bool]:
        """Return at most `max_bytes` bytes of a response, and whether it has more.

        Raises:
            ReadError: It could not be read.
        """
        if self._is_lost:
            raise ReadError("not tried: the API server stopped answering")
        try:
            status, content, is_cut = self._request(path, query, max_bytes)
        except ReadError:
            # A log or metrics may wait for a node that is down. /version needs the API server only.
            self._is_lost = not self._answers()
            raise
        if not 200 <= status < 300:
            raise ReadError(_refusal(status, content))
        return content, is_cut

    def _answers(self) -> bool:
        try:
            self._request("/version", {}, OBJECT_BYTES)
        except ReadError:
            return False
        return True

    def _request(
        self, path: str, query: Mapping[str, str | int], limit: int
    ) -> tuple[int, bytes, bool]:
        from kubernetes.client import ApiException  # noqa: PLC0415 - takes 0.5 s
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        try:
            method, url, headers, *_ = self._api.param_serialize(
                method="GET",
                resource_path=path,
                query_params=list(query.items()),
                header_params={"Accept": "application/json, */*"},
                auth_settings=["BearerToken"],
            )
            answer = self._api.call_api(method, url, headers, _request_timeout=TIMEOUT_S).response
            try:
                content, is_cut = _bounded(answer.stream(65536), limit)
                return int(answer.status), content, is_cut
            finally:
                answer.close()
        except (ApiException, HTTPError, OSError) as problem:
            reason = " ".join(str(problem).split()) or type(problem).__name__
            raise ReadError(f"no response: {reason[:500]}") from problem


def _bounded(chunks: Iterator[bytes], limit: int) -> tuple[bytes, bool]:
    content, end = bytearray(), time.monotonic() + READ_S
    for chunk in chunks:
        content += chunk
        if len(content) > limit:
            return bytes(content[:limit]), True
        if time.monotonic() > end:
            raise ReadError(f"no complete response in {READ_S:.0f} s")
    return bytes(content), False


def _refusal(status: int, content: bytes) -> str:
    """Return the code and message of a Status object."""
    try:
        message = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        message = content[:500].decode(errors="replace")
    return " ".join(f"{status}: {message}".split())[:500]
