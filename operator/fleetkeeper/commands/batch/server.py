"""The server, by the `openai` client, which is an extra of the distribution and slow to import."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, BinaryIO, Final

import httpx2
import openai

from fleetkeeper.commands.batch.model import ID, ApiError, Document

TIMEOUT: Final = openai.Timeout(None, connect=10.0, read=120.0)
"""Between two parts of an answer: a list reads many objects of the server's store."""
CHUNK: Final = 256 * 1024
PAGE: Final = 100
"""Batches that one request lists."""
TRANSIENT: Final = frozenset({429, 500, 502, 503, 504})
CHECK_URL: Final = "check --url (or FLEETKEEPER_URL)"
TODO: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "check FLEETKEEPER_API_KEY",
    HTTPStatus.FORBIDDEN: "the key may not do this: ask its administrator",
    HTTPStatus.NOT_FOUND: "this key has no such batch or file, or the URL does not lead to the batch API",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "send less in one file",
    HTTPStatus.TOO_MANY_REQUESTS: "wait, and try again",
    HTTPStatus.INSUFFICIENT_STORAGE: "the server has no room: ask its administrator",
}
"""Advice by status, printed after the server's own message."""


@contextmanager
def _as_api_error() -> Iterator[None]:
    """Raise what the client raises as an ApiError."""
    try:
        yield
    except openai.APIStatusError as problem:
        raise _refused(problem.response, problem.body) from problem
    except (openai.APITimeoutError, httpx2.TimeoutException) as problem:
        raise ApiError(
            f"{_request_of(problem)}: no answer in time; check the server, and try again",
            transient=True,
        ) from problem
    except (openai.APIConnectionError, httpx2.RequestError) as problem:
        cause = _printable(str(problem.__cause__ or problem))
        raise ApiError(
            f"{_request_of(problem)}: {cause}; {CHECK_URL}, and try again",
            transient=True,
        ) from problem
    except httpx2.InvalidURL as problem:
        raise ApiError(f"{_printable(str(problem))}; {CHECK_URL}") from problem


@contextmanager
def connected(url: str, key: str) -> Iterator[Server]:
    """Provide a server, by a client that sends the key there alone.

    Args:
        url: with or without /v1.
        key: the client's key.

    Raises:
        ApiError: the URL is none.
    """
    # The client sends headers of these variables, which belong to another server.
    for name in [name for name in os.environ if name.startswith("OPENAI_")]:
        del os.environ[name]
    with _as_api_error():
        client = openai.OpenAI(
            api_key=key,
            base_url=f"{url.rstrip('/').removesuffix('/v1').rstrip('/')}/v1",
            timeout=TIMEOUT,
            max_retries=0,  # a batch that is created twice runs twice
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False, verify=ssl.create_default_context()
            ),
        )
    with client:
        yield Server(client)


class Server:
    """Files and batches of a key. A method raises ApiError if the server does not do its work."""

    def __init__(self, client: openai.OpenAI) -> None:
        """Use a client that has the key."""
        self._url = str(client.base_url).rstrip("/")
        self._files, self._batches = client.files, client.batches.with_raw_response

    @_as_api_error()
    def upload(self, name: str, file: BinaryIO) -> Document:
        """Upload an input file, part by part, and return its record."""
        create = self._files.with_raw_response.create
        return self._file(_object(create(file=(_printable(name), file), purpose="batch")))

    def submit(self, file_id: str, settings: Mapping[str, Any]) -> Document:
        """Create a batch of an input file, and return it.

        If the server refuses, the file is deleted, because it counts to the key's quota.
        """
        try:
            return self._create(file_id, settings)
        except ApiError as problem:
            if not HTTPStatus.BAD_REQUEST <= problem.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise ApiError(
                    f"{problem}; the input file is uploaded as {file_id}, and the batch may exist: "
                    "see `fleetkeeper batch status`",
                    status=problem.status,
                ) from problem
            try:
                self._delete(file_id)
            except ApiError as left:
                raise ApiError(f"{problem}; the input file {file_id} stays: {left}") from problem
            raise

    @_as_api_error()
    def _create(self, file_id: str, settings: Mapping[str, Any]) -> Document:
        return self._batch(_object(self._batches.create(input_file_id=file_id, **settings)))

    @_as_api_error()
    def _delete(self, file_id: str) -> None:
        self._files.with_raw_response.delete(file_id)

    @_as_api_error()
    def get(self, batch_id: str) -> Document:
        """Return a batch."""
        return self._batch(_object(self._batches.retrieve(batch_id)))

    @_as_api_error()
    def list(self, limit: int) -> list[Document]:
        """Return the newest batches, at most `limit`."""
        found: list[Document] = []
        while len(found) < limit:
            after = {"after": found[-1]["id"]} if found else {}
            page = _object(self._batches.list(limit=min(PAGE, limit - len(found)), **after))
            some = page.get("data")
            if not isinstance(some, list):
                raise ApiError(f"{self._url}/batches: the answer is no list; {CHECK_URL}")
            found += map(self._batch, some)
            if not page.get("has_more") or not some:
                break
        return found

    @_as_api_error()
    def cancel(self, batch_id: str) -> Document:
        """Ask for the end of a batch, and return the batch."""
        return self._batch(_object(self._batches.cancel(batch_id)))

    @_as_api_error()
    def size_of(self, file_id: str) -> int:
        """Return the bytes of a file of a batch."""
        if not ID.fullmatch(str(file_id)):
            raise ApiError(f"{self._url}: the answer is no batch; {CHECK_URL}")
        found = self._file(_object(self._files.with_raw_response.retrieve(file_id)))
        return int(found["bytes"])

    def content(self, file_id: str) -> Iterator[bytes]:
        """Yield the parts of a file."""
        with (
            _as_api_error(),
            self._files.with_streaming_response.content(file_id) as answer,
        ):
            yield from answer.iter_bytes(CHUNK)

    def _batch(self, found: object) -> Document:
        return self._checked(found, "batch", "status", str)

    def _file(self, found: object) -> Document:
        return self._checked(found, "file", "bytes", int)

    def _checked(self, found: object, kind: str, field: str, its_type: type) -> Document:
        """Return a file or a batch. Its ID becomes part of paths, so it has no dot and no slash.

        Raises:
            ApiError: it is none, so another server answers.
        """
        if isinstance(found, dict) and isinstance(found.get(field), its_type):
            found_id = found.get("id")
            if isinstance(found_id, str) and ID.fullmatch(found_id):
                return found
        raise ApiError(f"{self._url}: the answer is no {kind}; {CHECK_URL}")


def _object(answer: Any) -> Document:  # noqa: ANN401 - the client's, as it came: `--json` prints it
    response = answer.http_response
    try:
        found = response.json()
    except ValueError as problem:
        raise ApiError(f"{_request_of(response)}: the answer is not JSON; {CHECK_URL}") from problem
    if not isinstance(found, dict):
        raise ApiError(f"{_request_of(response)}: the answer is no object; {CHECK_URL}")
    return found


def _refused(response: httpx2.Response, body: object) -> ApiError:
    status, wait = response.status_code, response.headers.get("Retry-After", "")
    message = body.get("message") if isinstance(body, dict) else None
    if isinstance(body, str) and body != response.text:
        message = body  # the text of `{"error": TEXT}`, as some proxies send it, not a page of HTML
    todo = TODO.get(status, "")
    # A quota, for example: the message says what to do, and waiting does not help.
    is_transient = status in TRANSIENT and response.headers.get("x-should-retry") != "false"
    if status in TRANSIENT and not is_transient:
        todo = ""
    elif is_transient and wait:
        todo = f"try again in {_printable(wait)} s"
    if response.is_redirect:
        to = _printable(response.headers.get("Location", "nowhere"))
        todo = f"the server redirects to {to}; {CHECK_URL}"
    said = _printable(str(message or response.reason_phrase))
    text = f"{_request_of(response)}: {status} {said}".rstrip()
    return ApiError(
        f"{text.rstrip('.')}; {todo}" if todo else text, status=status, transient=is_transient
    )


def _request_of(cause: Any) -> str:  # noqa: ANN401 - an answer or an exception of the client
    return f"{cause.request.method} {cause.request.url}"


def _printable(text: str) -> str:
    """Return a text of a server without control characters, which would reach the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:500]
