"""Tiers in front of vLLM's HTTP routes: an ASGI middleware that vLLM loads by `--middleware`.

It is the outermost layer of vLLM's application, outside its API-key check. It therefore checks the
key itself before a request may take a place in the queue. Decisions are in `admission` (pure); this
module reads the clock, shared memory and the wire.
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

from fleetkeeper_contract.headers import REQUEST_ID_HEADER, TIER_HEADER
from fleetkeeper_engine.in_vllm.http.admission.queue import Admission
from fleetkeeper_engine.in_vllm.http.admission.tickets import Refusal, Ticket
from fleetkeeper_engine.in_vllm.http.asgi import (
    App,
    ClientGone,
    Headers,
    Inbox,
    Receive,
    Scope,
    Send,
    answer,
    first_headers,
    without_headers,
)
from fleetkeeper_engine.in_vllm.http.bodies import BodyBudget, BodyLimits, Intake
from fleetkeeper_engine.in_vllm.http.lane import Lane, Place
from fleetkeeper_engine.in_vllm.http.replies import (
    CLOSE,
    DRAINED,
    NO_BACKGROUND,
    UNAUTHORIZED,
    Reply,
    refuse_body,
    refused_body,
    unknown_path,
    unknown_tier,
)
from fleetkeeper_engine.in_vllm.http.request_bounds import RefusedBodyError
from fleetkeeper_engine.in_vllm.http.request_shape import (
    Route,
    Shape,
    allows_background,
    check_sequences,
    route_of,
    shape_of,
    with_priority,
)
from fleetkeeper_engine.in_vllm.http.shared_state import SharedState
from fleetkeeper_engine.in_vllm.settings import INTERNAL_HEADER, VllmSettings
from fleetkeeper_engine.shm.layout import Outcome, Tier
from fleetkeeper_engine.shm.region import Region

logger = logging.getLogger("vllm.fleetkeeper")

_TIERS = {tier.label.encode(): tier for tier in Tier}
_TIER = TIER_HEADER.lower().encode()
_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
_TICK_S = 0.05
"""Period of the queue's tick while something waits in it."""
_REST_S = 0.25
"""Period while nothing waits, for closing bins and ending drains. A tick takes time from the engine
beside it."""
_PUBLISH_EVERY_S = 0.2
_PRIORITY_HEADERS = frozenset((b"x-vllm-priority", b"content-length", b"transfer-encoding"))
_INTERNAL = INTERNAL_HEADER.encode()
_LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


class TierMiddleware:
    """One queue of three tiers in front of the engine."""

    def __init__(
        self,
        app: App,
        settings: VllmSettings | None = None,
        region: Region | None = None,
        clock: Callable[[], float] = time.monotonic,
        bodies: BodyLimits | None = None,
    ) -> None:
        self._app = app
        settings = settings or VllmSettings.of_environment()
        self._clock = clock
        self._admission = Admission(settings)
        self._shared_state = SharedState(region or Region.of_environment(), self._admission)
        self._bodies = BodyBudget(bodies or BodyLimits())
        self._lane = Lane()
        self._max_sequences = settings.max_sequences
        self._token = settings.internal_token.encode()
        keys = [key for key in (os.environ.get("VLLM_API_KEY", ""),) if key]
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._running: dict[Ticket, asyncio.Task[object]] = {}
        self._aborted: set[Ticket] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._something_waits = asyncio.Event()
        self._publishes = False
        self._publish_due = 0.0

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one connection's scope.

        Not a coroutine of its own: a stream would wake it with each token.
        """
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        if scope["type"] == "http":
            return self._http(scope, receive, send)
        if scope["type"] == "lifespan":
            return self._app(scope, receive, send)
        return send({"type": "websocket.close", "code": 1008})

    def _http(  # noqa: PLR0911 - one return for each route
        self, scope: Scope, receive: Receive, send: Send
    ) -> Awaitable[None]:
        route = route_of(scope["method"], scope["path"])
        headers = first_headers(scope)
        if self._is_internal(headers):
            return self._app(without_headers(scope, (_INTERNAL,), []), receive, send)
        if route is Route.UNKNOWN or (route is Route.LOOPBACK and not _from_loopback(scope)):
            self._shared_state.rejected += 1
            return answer(send, 404, unknown_path(scope["path"]))
        if route in (Route.OPEN, Route.LOOPBACK) or scope["method"] == "OPTIONS":
            return self._app(scope, receive, send)
        if self._keys and not self._has_key(headers):
            self._shared_state.unauthorized += 1
            return answer(send, 401, UNAUTHORIZED)
        if route is Route.GENERATION:
            return self._generation(scope, headers, receive, send)
        if route is Route.TOKENIZER:
            return self._tokenizer(scope, headers, receive, send)
        return self._app(scope, receive, send)

    async def _generation(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        intake = Intake(self._bodies, self._bodies.limits.request_bytes, self._clock())
        inbox = Inbox(receive)
        try:
            enqueued = await self._enqueued(scope, headers, inbox, send, intake)
            if enqueued is not None:
                await self._admitted(*enqueued, scope=scope, inbox=inbox, send=send, intake=intake)
        finally:
            intake.release()

    async def _admitted(
        self,
        ticket: Ticket,
        shape: Shape,
        *,
        scope: Scope,
        inbox: Inbox,
        send: Send,
        intake: Intake,
    ) -> None:
        reply = Reply(send, self._publish_before_end)
        task = asyncio.current_task()
        try:
            self._publish_soon()
            priority = ticket.priority
            if priority is None:
                priority = await self._released(ticket, inbox)
            if priority is not None:
                if task is not None:
                    self._running[ticket] = task
                intake.body = with_priority(intake.body, shape, priority)
                scope = _with_priority_header(scope, priority, len(intake.body))
                inbox.replay(intake)
                await self._app(scope, inbox.receive, reply.send)
            elif ticket in self._aborted:
                await answer(send, 503, DRAINED, CLOSE)
        except asyncio.CancelledError:
            if task is None or ticket not in self._aborted or ticket not in self._running:
                raise
            task.uncancel()
            await reply.abort()
        finally:
            self._ended(ticket)

    async def _enqueued(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        inbox: Inbox,
        send: Send,
        intake: Intake,
    ) -> tuple[Ticket, Shape] | None:
        """Return a request's ticket and shape; None if it was answered here, or passed on unchanged."""
        arrived = self._clock()
        name = headers.get(_TIER, b"")
        tier = _tier_of(name)
        if tier is None:
            self._shared_state.rejected += 1
            await answer(send, 400, unknown_tier(name))
            return None
        self._shared_state.refresh()
        refusal = self._admission.refuse(tier, headers.get(_REQUEST_ID), arrived)
        if refusal is not None:
            await self._refuse(send, refusal)
            return None
        shape = await self._read(scope, headers, inbox, send, intake)
        if shape is None:
            return None
        self._shared_state.refresh()
        now = self._clock()
        ticket = self._admission.try_admit_now(
            tier, shape.sequences, arrived, now
        ) or self._admission.enqueue(tier, shape.sequences, arrived, now)
        if isinstance(ticket, Refusal):
            await self._refuse(send, ticket)
            return None
        return ticket, shape

    async def _read(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        inbox: Inbox,
        send: Send,
        intake: Intake,
    ) -> Shape | None:
        try:
            await intake.read(inbox.client, headers.get(b"content-length"))
            shape = shape_of(intake.body, scope["path"], intake.outline)
            if shape is not None:
                check_sequences(shape, scope["path"], self._max_sequences)
        except ClientGone:
            return None
        except RefusedBodyError as error:
            self._shared_state.rejected += 1
            await refuse_body(send, error)
            return None
        if shape is None:
            inbox.replay(intake)
            await self._app(scope, inbox.receive, send)
            return None
        if shape.in_background and allows_background(scope["path"]):
            self._shared_state.rejected += 1
            await answer(send, 400, NO_BACKGROUND)
            return None
        return shape

    async def _tokenizer(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        """Handle work for the API server's processor: bounded like a generation, and a few at a time."""
        intake = Intake(self._bodies, self._bodies.limits.tokenizer_bytes, self._clock())
        inbox = Inbox(receive)
        try:
            await intake.read(inbox.client, headers.get(b"content-length"))
            shape_of(intake.body, scope["path"], intake.outline)
            if not await self._lane.acquire(inbox):
                return
            place = Place(self._lane, send)
            try:
                inbox.replay(intake)
                await self._app(scope, inbox.receive, place.send)
            finally:
                place.release()
        except ClientGone:
            return
        except RefusedBodyError as error:
            self._shared_state.rejected += 1
            await refuse_body(send, error)
        finally:
            intake.release()

    async def _released(self, ticket: Ticket, inbox: Inbox) -> int | None:
        """Wait for the ticket's release and return its priority; None after a hang-up or the drain's end."""
        self._pump()
        if ticket.priority is not None:
            return ticket.priority
        loop = asyncio.get_running_loop()
        release: asyncio.Future[None] = loop.create_future()
        self._waiters[ticket] = release
        self._something_waits.set()
        gone = loop.create_task(inbox.gone())
        try:
            await asyncio.wait((release, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.pop(ticket, None)
            left = gone.done()
            gone.cancel()
        return None if left else ticket.priority

    def _ended(self, ticket: Ticket) -> None:
        self._running.pop(ticket, None)
        self._aborted.discard(ticket)
        self._admission.finish(ticket, self._clock())
        self._pump()
        if not self._admission.unfinished:
            # Publish now, because the next request may be hours away.
            self._shared_state.publish()

    def _publish_before_end(self) -> None:
        """Publish counters before the final frame, so that scrapers see the completed request."""
        if self._publishes and self._admission.unfinished <= 1:
            self._shared_state.publish()

    async def _refuse(self, send: Send, refusal: Refusal) -> None:
        self._publish_soon()
        self._publish_before_end()
        if refusal.outcome is Outcome.DRAINING:
            await answer(send, 503, DRAINED, CLOSE)
            return
        retry = [(b"retry-after", str(refusal.retry_after_s).encode())]
        await answer(send, 429, refused_body(refusal), retry)

    def _pump(self) -> None:
        """Release the requests that may be released, and publish the new state."""
        if self._admission.waiting:
            self._shared_state.refresh()
            for ticket in self._admission.release_ready(self._clock()):
                waiter = self._waiters.get(ticket)
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
        self._publish_soon()

    def _publish_soon(self) -> None:
        """Write shared memory in this iteration of the event loop, or 200 ms after the last such write."""
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
        self._shared_state.publish()

    async def _tick(self) -> None:
        """Do what must happen without a request: leases end, limits rise, bins close, drains end."""
        while True:
            try:
                now = self._clock()
                self._shared_state.refresh()
                self._admission.tick(self._shared_state.engine_oldest(), now)
                self._pump()
                self._bodies.abort_slow(now)
                if self._shared_state.drain_is_over(now):
                    self._end_drain(now)
            except Exception:
                # Every request moves the queue too; the next tick tries again.
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
        for ticket in self._admission.flush(now):
            self._aborted.add(ticket)
            waiter = self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        for ticket, task in list(self._running.items()):
            if ticket not in self._aborted:
                self._aborted.add(ticket)
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
    # vLLM lets a header override the body's priority, so ours replaces the client's in both.
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
