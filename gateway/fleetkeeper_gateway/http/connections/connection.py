"""A client's connection: uvicorn's protocol with bounds on heads and slow clients, and a visible abort."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar, Final

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fleetkeeper_gateway.http.asgi import Scope
from fleetkeeper_gateway.http.connections.budget import ConnectionBudget

MAX_HEADERS: Final = 128
MAX_HEAD_BYTES: Final = 65_536
"""Maximum bytes of a head, and of other input that the parser buffers."""
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_EXTENSION: Final = "fleetkeeper.connection"


class TooManyHeaders(Exception):
    """A head has more headers than allowed. The parser answers it with 400."""


class Connection(HttpToolsProtocol):
    """One connection. `abort` ends it in a way that no client mistakes for a complete answer."""

    client_timeout_s: ClassVar[float] = 60.0
    budget: ClassVar[ConnectionBudget]

    lost: Callable[[str], None] | None = None
    """Called with a reason when the connection ends while its request is open."""
    _running: RequestResponseCycle | None = None
    """The request that is being served. `cycle` is the last request that was read, which may still wait."""
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _is_second_head = False
    """True while the parser reads a head of our own making, which states the length of the body."""
    _has_head = False
    """True once the head of the last request is complete. Later headers are trailers of its body."""
    _counts_head = False
    """True while the budget counts the head that is being read."""
    _unsent_bytes = 0
    _silent_bytes = 0
    """Bytes since the parser's last callback."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a head."""
        super().connection_made(transport)
        self._await_head()
        self.budget.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the open request at once."""
        super().connection_lost(exc)
        self.budget.forget(self)
        self._cancel_timers()
        self._disconnect()
        if self.lost is not None:
            self.lost("client_gone")

    def data_received(self, data: bytes) -> None:
        """Parse data, and refuse an endless head."""
        self._unset_keepalive_if_required()
        self._silent_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._silent_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Request head too large.")
            return
        head_bytes = 0 if self._has_head else self._silent_bytes
        if head_bytes or self._counts_head:
            self._counts_head = head_bytes > 0
            self.budget.head(self, head_bytes)

    def accept(self) -> None:
        """Note that the client's key was accepted."""
        self.budget.accepted(self)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be parsed. Abort instead if an answer has begun: the 400 would become part of it."""
        running = self._running
        is_answering = running is not None and (
            running.response_started and not running.response_complete
        )
        if is_answering or self.pipeline:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Ignore a request to change the protocol, as HTTP/1.1 allows.

        The parser treats all that follows as the other protocol, so a second parser reads the body. Some
        clients ask for h2c with their first request and send its body with it.
        """
        self.cycle.more_body = True
        self.cycle.message_event.clear()
        framing = [pair for pair in self.headers if pair[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._is_second_head = True
        lines = [b"POST / HTTP/1.1", *(b"%b: %b" % pair for pair in framing), b"", b""]
        self._feed(b"\r\n".join(lines))
        self._is_second_head = False
        if rest:
            self._feed(rest)

    def on_message_begin(self) -> None:
        """Add the connection to the request's scope, and wait for the rest of the head."""
        if self._is_second_head:
            return
        super().on_message_begin()
        self._has_head = False
        self.scope["extensions"] = {_EXTENSION: self}  # type: ignore[dict-item]
        if self._head_timer is None:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        """Store a part of the URL."""
        if not self._is_second_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header, within bounds.

        Trailers are dropped: a proxy that checks headers may forward trailers unchecked.
        """
        if self._is_second_head or self._has_head:
            return
        if len(self.headers) >= MAX_HEADERS:
            raise TooManyHeaders
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request on."""
        self._silent_bytes = 0
        if self._is_second_head:
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._has_head = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Pass the end of the body on."""
        self._silent_bytes = 0
        super().on_message_complete()
        if not self.pipeline:
            # The last part may have paused reading. Without reading, the end of the connection is not seen.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Start the next request while the client still reads the end of this answer."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_writes()

    def pause_writing(self) -> None:
        """Pause the answer until the client reads."""
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        """Continue the answer."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def abort(self) -> None:
        """Close the connection at once. Data that the client has not read is dropped."""
        self._end()
        self.transport.abort()

    def close(self) -> None:
        """End an incomplete answer: forwarded data still arrives, but no regular end."""
        self._end()
        self.transport.close()
        self._watch_writes()

    def _end(self) -> None:
        self.lost = None
        self._disconnect()

    def _disconnect(self) -> None:
        if self._running is not None and not self._running.response_complete:
            # The application returns without a complete answer, on purpose.
            self._running.disconnected = True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.client_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.transport.abort()

    def _watch_writes(self) -> None:
        if self._stall_timer is None:
            self._unsent_bytes = self.transport.get_write_buffer_size()
            self._stall_timer = self.loop.call_later(self.client_timeout_s, self._check_writes)

    def _check_writes(self) -> None:
        self._stall_timer = None
        unsent_bytes = self.transport.get_write_buffer_size()
        if not unsent_bytes:
            return
        if unsent_bytes < self._unsent_bytes:
            self._watch_writes()
            return
        lost, self.lost = self.lost, None
        if lost is not None:
            lost("slow_reader")
        self.transport.abort()

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._stall_timer = None


def connection_class(
    client_timeout_s: float, budget: ConnectionBudget | None = None
) -> type[Connection]:
    """Return the protocol class for the connections of one server, for uvicorn."""
    own = {"client_timeout_s": client_timeout_s, "budget": budget or ConnectionBudget()}
    return type("Connection", (Connection,), own)


def connection_of(scope: Scope) -> Connection:
    """Return the connection of a request."""
    connection: Connection = scope["extensions"][_EXTENSION]
    return connection
