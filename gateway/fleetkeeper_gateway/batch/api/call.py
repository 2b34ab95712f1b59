"""A request, from its head to its last byte: authentication, body, answer and audit log."""

from __future__ import annotations

import asyncio
import traceback
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from fleetkeeper_contract.headers import REQUEST_ID_HEADER
from fleetkeeper_gateway.batch.api.key_state import KeyState
from fleetkeeper_gateway.batch.api.parts import ApiParts
from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.http.answers import answer_json, refuse
from fleetkeeper_gateway.http.asgi import ClientGone, Headers, Message, Receive, Scope, Send
from fleetkeeper_gateway.http.client_headers import (
    CLIENT_REQUEST_ID_HEADER,
    ClientHeaders,
    parse_headers,
)
from fleetkeeper_gateway.http.connections.bodies import MIN_BYTES_PER_S, Body, BodyBudget
from fleetkeeper_gateway.http.connections.connection import connection_of
from fleetkeeper_gateway.http.errors import SERVER, Refusal, key_refused, unavailable
from fleetkeeper_gateway.interfaces import KeyRefused

log: structlog.stdlib.BoundLogger = structlog.get_logger("fleetkeeper_gateway.batch.api")

CLIENT_CLOSED: Final = 499
"""Status in the audit log of a request whose client got no status."""
_RETRY_S: Final = 5
_KEY_CHECK_S: Final = 0.5
"""Period of the checks of a key. Together with the watch of keys, a change takes effect within 2 s."""
_BODY_HEADERS: Final = frozenset({b"content-length", b"transfer-encoding"})
_REQUEST_ID: Final = REQUEST_ID_HEADER.lower().encode()
_CLIENT_REQUEST_ID: Final = CLIENT_REQUEST_ID_HEADER.lower().encode()


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer that is sent in parts."""

    first: bytes
    """The first part, which exists before the answer begins, so that an error can still be answered."""
    rest: AsyncGenerator[bytes, None]
    """Further parts. Closed at the end of the answer in any case."""
    length: int
    """Total bytes of all parts."""
    headers: Headers


Handler = Callable[["Call"], Awaitable[object]]
"""Returns a value to send as JSON, or a `Stream`."""


class Call:
    """A client's request."""

    def __init__(
        self,
        parts: ApiParts,
        keys: defaultdict[str, KeyState],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self.parts = parts
        self._keys = keys
        self.scope = scope
        self.id = uuid.uuid4().hex
        self.headers = ClientHeaders()
        self._receive = receive
        self._send = send
        self._more = any(name in _BODY_HEADERS for name, _ in scope["headers"])
        """True while the client may still send a part of its body."""
        self._received = 0
        self._waited_s = 0.0
        self._started = False
        self._key_id: str | None = None
        self._outcome = "aborted"
        self._status = CLIENT_CLOSED

    @property
    def key_id(self) -> str:
        """Return the ID of the client's key."""
        if self._key_id is None:
            raise RuntimeError("a request is handled once its key is known")
        return self._key_id

    @property
    def key(self) -> KeyState:
        """Return the state of the client's key."""
        return self._keys[self.key_id]

    def path_id(self) -> str:
        """Return the ID in the path, unchecked."""
        found: str = self.scope["path_params"]["id"]
        return found

    async def run(self, handler: Handler) -> None:
        """Serve the request."""
        try:
            await self._serve(handler)
        except Refusal as refusal:
            await self._refuse(refusal)
        except KeyRefused as error:
            self._key_id = error.key_id
            await self._refuse(key_refused(error))
        except StorageError as error:
            log.warning("the store failed", request=self.id, error=str(error))
            await self._fail(
                unavailable(
                    "storage_unavailable",
                    f"The store of files and batches does not answer. Try again in {_RETRY_S} s.",
                    _RETRY_S,
                )
            )
        except ClientGone:
            if self._outcome != "key_revoked":
                self._outcome = "client_gone"
            if self._started:
                connection_of(self.scope).abort()
        except Exception as error:  # noqa: BLE001 - the message of an unknown one may hold content
            log.error(  # noqa: TRY400
                "request failed",
                request=self.id,
                error=type(error).__name__,
                stack="".join(traceback.format_tb(error.__traceback__)),
            )
            await self._fail(
                Refusal(500, "internal_error", "The request failed. Our log says why.", kind=SERVER)
            )
        finally:
            self._record()

    # -- the body ---------------------------------------------------------------------------------

    async def read_body(self, max_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            ClientGone: if the client closed the connection before the end.
            Refusal: if the body is too large or too slow.
        """
        # A budget for this body alone: a key holds at most half of one.
        body = Body(BodyBudget(2 * max_bytes), max_bytes, self.parts.client_timeout_s)
        try:
            await body.read(self._receive, self.headers.content_length, self.key_id)
        finally:
            self._more = body.more
        return body.data

    async def read_part(self) -> bytes:
        """Return the next part of the body; nothing at its end.

        Raises:
            ClientGone: if the client closed the connection before the end.
            Refusal: if the client sends nothing for too long, or is too slow in total.
        """
        while self._more:
            message = await self._next_message()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            self._more = message.get("more_body", False)
            self._received += len(part)
            if part:
                return part
        return b""

    async def _next_message(self) -> Message:
        """Wait for the client. Its total time grows with the bytes that it sent."""
        timeout_s = self.parts.client_timeout_s
        left_s = timeout_s + self._received / MIN_BYTES_PER_S - self._waited_s
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(min(timeout_s, left_s)):
                return await self._receive()
        except TimeoutError:
            raise Refusal(
                408,
                "body_too_slow",
                f"The body arrived too slowly: {self._received} bytes, then nothing or too little "
                f"for {timeout_s:.0f} s.",
            ) from None
        finally:
            self._waited_s += loop.time() - began

    # -- the answer -------------------------------------------------------------------------------

    async def _serve(self, handler: Handler) -> None:
        self.headers = parse_headers(self.scope["headers"])
        key = self.parts.keys.authenticate(self.headers.authorization, self.parts.clock())
        connection_of(self.scope).accept()
        self._key_id = key.id
        if self.headers.encoding not in ("", "identity"):
            raise Refusal(
                415, "encoding_not_supported", "Send the body without a Content-Encoding."
            )
        with self.key.open_call():
            value = await handler(self)
            if isinstance(value, Stream):
                await self._send_stream(value)
            else:
                self._started = True
                await answer_json(self._send, value, self._own_headers())
        self._outcome, self._status = "ok", 200

    async def _send_stream(self, stream: Stream) -> None:
        """Send a stream. It ends early with its key, with the connection, or if the client stops reading for too long."""
        headers = [(b"content-length", str(stream.length).encode()), *stream.headers]
        self._started = True
        watch = asyncio.ensure_future(self._end_with_key())
        try:
            await self._send_part(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": headers + self._own_headers(),
                }
            )
            part, sent = stream.first, 0
            while part and (sent := sent + len(part)) <= stream.length:
                await self._send_part(
                    {"type": "http.response.body", "body": part, "more_body": True}
                )
                part = await anext(stream.rest, b"")
        finally:
            watch.cancel()
            await stream.rest.aclose()
        if sent != stream.length:
            raise StorageError(f"the stream of {stream.length} bytes has another length")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self.parts.client_timeout_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None
        if connection_of(self.scope).transport.is_closing():
            raise ClientGone

    async def _end_with_key(self) -> None:
        """Close the connection when the key is revoked or expires, also if the client reads nothing."""
        # The end of a key is no event, so it is polled.
        while self.parts.keys.in_force(self.key_id, self.parts.clock()):  # noqa: ASYNC110
            await asyncio.sleep(_KEY_CHECK_S)
        self._outcome = "key_revoked"
        connection_of(self.scope).abort()

    async def _refuse(self, refusal: Refusal) -> None:
        self._started = True
        self._outcome, self._status = refusal.code, refusal.status
        await refuse(self._send, self._receive, refusal, self._own_headers(), unread=self._more)

    async def _fail(self, refusal: Refusal) -> None:
        """Answer with an error, or abort an answer that has begun."""
        if self._started:
            self._outcome = refusal.code
            connection_of(self.scope).close()
        else:
            await self._refuse(refusal)

    def _own_headers(self) -> Headers:
        headers: Headers = [(_REQUEST_ID, self.id.encode())]
        if self.headers.request_id is not None:
            headers.append((_CLIENT_REQUEST_ID, self.headers.request_id.encode()))
        return headers

    def _record(self) -> None:
        client = self.scope.get("client") or ("",)
        self.parts.audit.request(
            key_id=self._key_id,
            request_id=self.id,
            service=None,
            model=None,
            tier=None,
            outcome=self._outcome,
            status=self._status,
            client=client[0],
        )
