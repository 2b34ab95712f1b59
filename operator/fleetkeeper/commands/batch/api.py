"""Files and batches of a server that speaks OpenAI's API."""

from __future__ import annotations

import io
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from http.client import responses
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp

CONNECT_S: Final = 10.0
READ_S: Final = 120.0
"""Longest time between two parts of an answer. A list reads many objects of the server's store."""
CHUNK: Final = 256 * 1024
PAGE: Final = 100
"""Batches that one request lists."""
TRANSIENT: Final = frozenset({429, 500, 502, 503, 504})
ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
Document = dict[str, Any]
OnBytes = Callable[[int], None]


class ApiError(Exception):
    """A request that failed. The message says what, where, and what to do.

    Attributes:
        status: of the answer; 0 if none came.
        transient: whether the same request may succeed a little later.
    """

    def __init__(self, message: str, *, status: int = 0, transient: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.transient = transient


class BatchApi:
    """A server at a URL, asked with a key. `batch_api` makes one."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """Use a session whose headers have the key."""
        self._session = session
        self._url = url

    async def upload(self, path: Path, on_bytes: OnBytes) -> Document:
        """Upload an input file, part by part, and return its record.

        Args:
            path: the file.
            on_bytes: called with the number of bytes that were read to be sent.

        Raises:
            ApiError: it was not accepted.
        """
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        try:
            file = _Counted(path, on_bytes)
        except OSError as problem:
            raise ApiError(f"cannot read {path}: {problem.strerror or problem}") from problem
        with file:
            form.add_field("file", file, filename=_printable(path.name))
            return _checked(await self._ask("POST", "files", data=form), "file", self._url)

    async def delete_file(self, file_id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: it was not deleted.
        """
        await self._ask("DELETE", f"files/{file_id}")

    async def create(self, body: Mapping[str, Any]) -> Document:
        """Create a batch and return it.

        Raises:
            ApiError: it was not created, or no answer came, and it may exist.
        """
        return _checked(await self._ask("POST", "batches", json=body), "batch", self._url)

    async def get(self, batch_id: str) -> Document:
        """Return a batch.

        Raises:
            ApiError: the key has none of that ID, or the server does not answer.
        """
        return _checked(await self._ask("GET", f"batches/{batch_id}"), "batch", self._url)

    async def list(self, limit: int) -> list[Document]:
        """Return the newest batches of the key, at most `limit`.

        Raises:
            ApiError: the server does not answer.
        """
        found: list[Document] = []
        while len(found) < limit:
            query = {"limit": str(min(PAGE, limit - len(found)))}
            if found:
                query["after"] = found[-1]["id"]
            page = await self._ask("GET", f"batches?{urlencode(query)}")
            some = page.get("data")
            if not isinstance(some, list):
                raise ApiError(f"{self._url}/v1/batches: the answer is no list; {CHECK_URL}")
            found += [_checked(one, "batch", self._url) for one in some]
            if not page.get("has_more") or not some:
                break
        return found

    async def cancel(self, batch_id: str) -> Document:
        """Ask for the end of a batch, and return the batch.

        Raises:
            ApiError: it was refused, or the server does not answer.
        """
        found = await self._ask("POST", f"batches/{batch_id}/cancel")
        return _checked(found, "batch", self._url)

    async def file(self, file_id: str) -> Document:
        """Return the record of a file.

        Raises:
            ApiError: the key has none of that ID, or the server does not answer.
        """
        return _checked(await self._ask("GET", f"files/{file_id}"), "file", self._url)

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        """Yield the parts of a file.

        Raises:
            ApiError: it cannot be read to its end.
        """
        async with self._request("GET", f"files/{file_id}/content") as answer:
            async for part in answer.content.iter_chunked(CHUNK):
                yield part

    async def _ask(self, method: str, path: str, **content: Any) -> Document:  # noqa: ANN401 - of aiohttp
        async with self._request(method, path, **content) as answer:
            text = await answer.read()
        try:
            found = json.loads(text)
        except ValueError as problem:
            raise ApiError(
                f"{method} {self._url}/v1/{path}: the answer is not JSON; {CHECK_URL}"
            ) from problem
        if not isinstance(found, dict):
            raise ApiError(f"{method} {self._url}/v1/{path}: the answer is no object; {CHECK_URL}")
        return found

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        **content: Any,  # noqa: ANN401 - of aiohttp
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Provide an answer with status 200.

        Raises:
            ApiError: another status came, or none, or the answer ended early.
        """
        address = f"{self._url}/v1/{path}"
        try:
            # The key must not follow a redirection to another host.
            async with self._session.request(
                method, address, allow_redirects=False, **content
            ) as answer:
                if answer.status != HTTPStatus.OK:
                    raise _refused(
                        f"{method} {address}", answer.status, answer.headers, await answer.read()
                    )
                yield answer
        except TimeoutError as problem:
            raise ApiError(
                f"{method} {address}: no answer in time; check the server, and try again",
                transient=True,
            ) from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise ApiError(
                f"{method} {address}: {_in_a_line(problem)}; {CHECK_URL}, and try again",
                transient=not isinstance(problem, aiohttp.InvalidURL),
            ) from problem


def _checked(found: object, kind: str, url: str) -> Document:
    """Return a file or a batch. Its ID becomes part of paths, so it has no dot and no slash.

    Raises:
        ApiError: it is none, so another server answers.
    """
    field, its_type = ("status", str) if kind == "batch" else ("bytes", int)
    if isinstance(found, dict) and isinstance(found.get(field), its_type):
        found_id = found.get("id")
        if isinstance(found_id, str) and ID.fullmatch(found_id):
            return found
    raise ApiError(f"{url}/v1: the answer is no {kind}; {CHECK_URL}")


CHECK_URL: Final = "check --url (or FLEETKEEPER_URL)"
TODO: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "check FLEETKEEPER_API_KEY",
    HTTPStatus.FORBIDDEN: "the key may not do this: ask its administrator",
    HTTPStatus.NOT_FOUND: "this key has no such batch or file, or the URL does not lead to the batch API",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "send less in one file",
    HTTPStatus.TOO_MANY_REQUESTS: "wait, and try again",
    HTTPStatus.INSUFFICIENT_STORAGE: "the server has no room: ask its administrator",
}
"""What to do, by status; the server's own message comes before it."""


def _refused(what: str, status: int, headers: Mapping[str, str], content: bytes) -> ApiError:
    message = _message_of(content) or responses.get(status, "")
    wait = headers.get("Retry-After", "")
    todo = TODO.get(status, "")
    # A quota, for example: the message says what to do, and waiting does not help.
    is_transient = status in TRANSIENT and headers.get("x-should-retry") != "false"
    if status in TRANSIENT and not is_transient:
        todo = ""
    elif is_transient and wait:
        todo = f"try again in {wait} s"
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        todo = f"the server redirects to {headers.get('Location', 'nowhere')}; {CHECK_URL}"
    text = f"{what}: {status} {_printable(message)}".rstrip()
    return ApiError(
        f"{text.rstrip('.')}; {todo}" if todo else text,
        status=status,
        transient=is_transient,
    )


def _message_of(content: bytes) -> str:
    """Return the message of an error body in OpenAI's format; empty if it is none."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return ""


def _printable(text: str) -> str:
    """Return a text of a server without control characters, which would reach the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:500]


def _in_a_line(problem: Exception) -> str:
    text = str(problem) or type(problem).__name__
    return _printable(text.splitlines()[0])


class _Counted(io.BufferedReader):
    """A file that tells how much of it was read."""

    def __init__(self, path: Path, on_bytes: OnBytes) -> None:
        super().__init__(io.FileIO(path, "rb"))
        self._on_bytes = on_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._on_bytes(len(data))
        return data


@asynccontextmanager
async def batch_api(url: str, key: str) -> AsyncIterator[BatchApi]:
    """Provide the API of a server.

    Args:
        url: with or without /v1.
        key: the client's key.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"}, timeout=timeout, trust_env=True
    ) as session:
        yield BatchApi(session, url.rstrip("/").removesuffix("/v1").rstrip("/"))
