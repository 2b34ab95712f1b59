"""Tiers in front of vLLM's HTTP routes: an ASGI middleware, named to vLLM by `--middleware`.

It is the outermost part of vLLM's application, outside its API-key check, so it checks the key itself
before a request may take a place in the queue. Decisions are in `admission` (pure); this file reads
the clock, the page and the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping

from fleetkeeper_engine.admission import Admission, Refusal, Ticket
from fleetkeeper_engine.asgi import (
    App,
    ClientGone,
    Headers,
    Inbox,
    Message,
    Receive,
    Scope,
    Send,
    answer,
    error_body,
    first_headers,
    without_headers,
)
from fleetkeeper_engine.inside import INTERNAL_HEADER, InsideSettings
from fleetkeeper_engine.middleware_page import MiddlewarePage
from fleetkeeper_engine.page import Page
from fleetkeeper_engine.page_layout import Outcome, Tier
from fleetkeeper_engine.request_shape import (
    Route,
    Shape,
    allows_background,
    route_of,
    shape_of,
    with_priority,
)

logger = logging.getLogger("vllm.fleetkeeper")

TIER_HEADER = "X-Inference-Tier"
_TIERS = {tier.label.encode(): tier for tier in Tier}
_TIER = TIER_HEADER.lower().encode()
_REQUEST_ID = b"x-request-id"
_TICK_S = 0.05
"""How often the queue is looked at while something waits in it."""
_REST_S = 0.25
"""And while nothing does: bins close and drains end then. A tick takes time from the engine beside it."""
_PUBLISH_EVERY_S = 0.2
_PRIORITY_HEADERS = frozenset((b"x-vllm-priority", b"content-length", b"transfer-encoding"))
_INTERNAL = INTERNAL_HEADER.encode()
_LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
_DRAINED = error_body(
    "This replica is shutting down. Send the request again; another replica will take it.",
    "server_error",
    "draining",
)
_EVENTS = b"text/event-stream"
_CUT_EVENT = b"data: " + _DRAINED + b"\n\ndata: [DONE]\n\n"


class _Reply:
    """Passes a response on and knows how far it is; calls `before_end` before its last frame."""

    def __init__(self, send: Send, before_end: Callable[[], None]) -> None:
        self._send = send
        self._before_end = before_end
        self._start: Message | None = None
        self._ended = False

    def send(self, message: Message) -> Awaitable[None]:
        """For vLLM to send through. No coroutine of its own: a stream comes here with each token."""
        if not message.get("more_body", False):
            self._begins_or_ends(message)
        return self._send(message)

    def _begins_or_ends(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._ended = True
            self._before_end()

    async def cut(self) -> None:
        """Ends the response at a whole frame: a clean 503, or an error as the last event."""
        if self._ended:
            return
        if self._start is None:
            await answer(self._send, 503, _DRAINED, [(b"connection", b"close")])
        elif first_headers(self._start).get(b"content-type", b"").startswith(_EVENTS):
            await self._send({"type": "http.response.body", "body": _CUT_EVENT, "more_body": False})


class TierMiddleware:
    """One queue of three tiers in front of the engine."""

    def __init__(
        self,
        app: App,
        settings: InsideSettings | None = None,
        page: Page | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        settings = settings or InsideSettings.of_environment()
        self._clock = clock
        self._admission = Admission(settings)
        self._board = MiddlewarePage(page or Page.of_environment(), self._admission)
        self._token = settings.internal_token.encode()
        keys = [key for key in (os.environ.get("VLLM_API_KEY", ""),) if key]
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._inside: dict[Ticket, asyncio.Task[object]] = {}
        self._cut: set[Ticket] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._something_waits = asyncio.Event()
        self._publishes = False
        self._publish_due = 0.0

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handles one connection's scope. No coroutine of its own: a stream wakes each with each token."""
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        if scope["type"] == "http":
            return self._http(scope, receive, send)
        if scope["type"] == "lifespan":
            return self._app(scope, receive, send)
        return send({"type": "websocket.close", "code": 1008})

    def _http(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        route = route_of(scope["method"], scope["path"])
        headers = first_headers(scope)
        if self._is_internal(headers):
            return self._app(without_headers(scope, (_INTERNAL,), []), receive, send)
        if route is Route.UNKNOWN or (route is Route.LOOPBACK and not _from_loopback(scope)):
            self._board.rejected += 1
            return answer(send, 404, _unknown_path(scope["path"]))
        if route in (Route.OPEN, Route.LOOPBACK) or scope["method"] == "OPTIONS":
            return self._app(scope, receive, send)
        if self._keys and not self._has_key(headers):
            self._board.unauthorized += 1
            return answer(send, 401, _UNAUTHORIZED)
        if route is Route.GENERATION:
            return self._generation(scope, headers, receive, send)
        return self._app(scope, receive, send)

    async def _generation(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        inbox = Inbox(receive)
        entered = await self._entered(scope, headers, inbox, send)
        if entered is None:
            return
        ticket, body, shape = entered
        reply = _Reply(send, self._say_last)
        task = asyncio.current_task()
        try:
            self._publish_soon()
            priority = ticket.priority
            if priority is None:
                priority = await self._released(ticket, inbox)
            if priority is not None:
                if task is not None:
                    self._inside[ticket] = task
                body = with_priority(body, shape, priority)
                inbox.give_again(body)
                scope = _with_priority_header(scope, priority, len(body))
                await self._app(scope, inbox.receive, reply.send)
            elif ticket in self._cut:
                await answer(send, 503, _DRAINED, [(b"connection", b"close")])
        except asyncio.CancelledError:
            if task is None or ticket not in self._cut or ticket not in self._inside:
                raise
            task.uncancel()
            await reply.cut()
        finally:
            self._ended(ticket)

    async def _entered(
        self, scope: Scope, headers: Mapping[bytes, bytes], inbox: Inbox, send: Send
    ) -> tuple[Ticket, bytes, Shape] | None:
        """A request's ticket, with its body; None when it was answered here, or went on as it came."""
        arrived = self._clock()
        name = headers.get(_TIER, b"")
        tier = _tier_of(name)
        if tier is None:
            self._board.rejected += 1
            await answer(send, 400, _unknown_tier(name))
            return None
        self._board.read_orders()
        refusal = self._admission.refuse(tier, headers.get(_REQUEST_ID), arrived)
        if refusal is not None:
            await self._refuse(send, refusal)
            return None
        read = await self._read(scope, inbox, send)
        if read is None:
            return None
        body, shape = read
        self._board.read_orders()
        now = self._clock()
        ticket = self._admission.pass_by(
            tier, shape.sequences, arrived, now
        ) or self._admission.enter(tier, shape.sequences, arrived, now)
        if isinstance(ticket, Refusal):
            await self._refuse(send, ticket)
            return None
        return ticket, body, shape

    async def _read(self, scope: Scope, inbox: Inbox, send: Send) -> tuple[bytes, Shape] | None:
        try:
            body = await inbox.body()
        except ClientGone:
            return None
        shape = shape_of(body)
        if shape is None:
            inbox.give_again(body)
            await self._app(scope, inbox.receive, send)
            return None
        if shape.in_background and allows_background(scope["path"]):
            self._board.rejected += 1
            await answer(send, 400, _NO_BACKGROUND)
            return None
        return body, shape

    async def _released(self, ticket: Ticket, inbox: Inbox) -> int | None:
        """Waits for the ticket's turn and priority; None when the client hung up or the drain is over."""
        self._pump()
        if ticket.priority is not None:
            return ticket.priority
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiters[ticket] = turn
        self._something_waits.set()
        gone = loop.create_task(inbox.gone())
        try:
            await asyncio.wait((turn, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.pop(ticket, None)
            left = gone.done()
            gone.cancel()
        return None if left else ticket.priority

    def _ended(self, ticket: Ticket) -> None:
        self._inside.pop(ticket, None)
        self._cut.discard(ticket)
        self._admission.finish(ticket, self._clock())
        self._pump()
        if not self._admission.in_hand:
            # Nothing may come for hours: what is said last stays right.
            self._board.publish()

    def _say_last(self) -> None:
        """Whoever looks after the last answer sees its request counted, so before its end is sent."""
        if self._publishes and self._admission.in_hand <= 1:
            self._board.publish()

    async def _refuse(self, send: Send, refusal: Refusal) -> None:
        self._publish_soon()
        self._say_last()
        if refusal.outcome is Outcome.DRAINING:
            await answer(send, 503, _DRAINED, [(b"connection", b"close")])
            return
        retry = [(b"retry-after", str(refusal.retry_after_s).encode())]
        await answer(send, 429, _refused_body(refusal), retry)

    def _pump(self) -> None:
        """Releases what may be released and says so on the page."""
        if self._admission.waiting:
            self._board.read_orders()
            for ticket in self._admission.take_released(self._clock()):
                waiter = self._waiters.get(ticket)
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
        self._publish_soon()

    def _publish_soon(self) -> None:
        """Writes the page in this turn of the event loop, or 200 ms after it was last written so."""
        if self._publishes:
            return
        self._publishes = True
        loop = asyncio.get_running_loop()
        if loop.time() >= self._publish_due:
            loop.call_soon(self._publish, loop)
        else:
            loop.call_at(self._publish_due, self._publish, loop)

    def _publish(self, loop: asyncio.AbstractEventLoop) -> None:
        self._publishes = False
        self._publish_due = loop.time() + _PUBLISH_EVERY_S
        self._board.publish()

    async def _tick(self) -> None:
        """What must happen without a request: leases end, limits rise, bins close, drains end."""
        while True:
            try:
                now = self._clock()
                self._board.read_orders()
                self._admission.tick(self._board.engine_oldest(), now)
                self._pump()
                if self._board.drain_is_over(now):
                    self._end_drain(now)
            except Exception:
                # The queue is moved by every request too; the next tick tries again.
                logger.exception("a tick of the admission queue failed")
            await self._until_next_tick()

    async def _until_next_tick(self) -> None:
        if self._waiters:
            await asyncio.sleep(_TICK_S)
            return
        self._something_waits.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._something_waits.wait(), _REST_S)

    def _end_drain(self, now: float) -> None:
        for ticket in self._admission.expel(now):
            self._cut.add(ticket)
            waiter = self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        for ticket, task in list(self._inside.items()):
            if ticket not in self._cut:
                self._cut.add(ticket)
                task.cancel()

    def _is_internal(self, headers: Mapping[bytes, bytes]) -> bool:
        given = headers.get(_INTERNAL)
        return bool(self._token) and given is not None and _same(given, self._token)

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key).digest()
        known = [_same(digest, allowed) for allowed in self._keys]
        return scheme.lower() == b"bearer" and any(known)


def _tier_of(name: bytes) -> Tier | None:
    return _TIERS.get(name.strip().lower()) if name else Tier.STANDARD


def _with_priority_header(scope: Scope, priority: int, length: int) -> Scope:
    # vLLM lets a header override the body's priority: ours replaces the client's in both.
    own: Headers = [
        (b"x-vllm-priority", str(priority).encode()),
        (b"content-length", str(length).encode()),
    ]
    return without_headers(scope, _PRIORITY_HEADERS, own)


def _same(left: bytes, right: bytes) -> bool:
    return hmac.compare_digest(left, right)


def _from_loopback(scope: Scope) -> bool:
    client = scope.get("client") or ("",)
    return client[0] in _LOOPBACK


_UNAUTHORIZED = error_body(
    "The API key is missing or wrong.", "invalid_request_error", "invalid_api_key"
)

# Its sequences would run on after the answer, unseen by queue, limits and drain; and it is kept in the
# memory of one replica, where the next request for it hardly arrives.
_NO_BACKGROUND = error_body(
    "background is not supported: a response is made while its request is open. "
    "Send it with background false, and with the tier batch when it may wait.",
    "invalid_request_error",
    "background_not_supported",
)


def _unknown_path(path: str) -> bytes:
    return error_body(f"There is no {path[:200]!r} here.", "invalid_request_error", "unknown_path")


def _unknown_tier(name: bytes) -> bytes:
    labels = ", ".join(tier.label for tier in Tier)
    return error_body(
        f"{TIER_HEADER} is {str(name[:64], 'latin-1')!r}; it must be one of {labels}.",
        "invalid_request_error",
        "unknown_tier",
    )


def _refused_body(refusal: Refusal) -> bytes:
    tier, again = refusal.tier.label, f"Try again in {refusal.retry_after_s} s."
    if refusal.outcome is Outcome.TIER_CLOSED:
        message = f"The {tier} tier is closed on this replica. {again}"
    else:
        message = f"The {tier} queue of this replica is full ({refusal.limit} requests). {again}"
    return error_body(
        message, "rate_limit_error", refusal.outcome.label, tier=tier, limit=refusal.limit
    )
