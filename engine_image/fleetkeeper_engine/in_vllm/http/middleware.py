"""Tiers in front of vLLM's HTTP routes: an ASGI middleware that vLLM loads by `--middleware`.

It is the outermost layer of vLLM's application. Decisions are in `admission` (pure), and
`dispatcher` moves the queue; this module reads the wire.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping

from fleetkeeper_contract.bodies.refused import RefusedBodyError
from fleetkeeper_contract.headers import REQUEST_ID_HEADER, TIER_HEADER
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.access import INTERNAL, Access, is_from_loopback
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
from fleetkeeper_engine.in_vllm.http.dispatcher import Dispatcher
from fleetkeeper_engine.in_vllm.http.grants.gate import GrantGate, GrantsFullError, release, use
from fleetkeeper_engine.in_vllm.http.grants.identity import identity_of
from fleetkeeper_engine.in_vllm.http.grants.refusals import GRANTS_FULL, GrantRefusedError
from fleetkeeper_engine.in_vllm.http.lane import Lane, LanePlace
from fleetkeeper_engine.in_vllm.http.latencies import StreamTimer, stream_of
from fleetkeeper_engine.in_vllm.http.replies import (
    CLOSE,
    DRAINED,
    NO_BACKGROUND,
    SHED,
    UNAUTHORIZED,
    Reply,
    refuse_body,
    refused_body,
    unknown_path,
    unknown_tier,
)
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
from fleetkeeper_engine.in_vllm.usage.accounts import CURRENT, Accounts
from fleetkeeper_engine.in_vllm.usage.hooks import install
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.layout import Outcome
from fleetkeeper_engine.shm.region import Region

_TIERS = {tier.label.encode(): tier for tier in Tier}
_TIER = TIER_HEADER.lower().encode()
_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
_PRIORITY_HEADERS = frozenset((b"x-vllm-priority", b"content-length", b"transfer-encoding"))


class TierMiddleware:
    """One queue of three tiers in front of the engine."""

    def __init__(
        self,
        app: App,
        settings: VllmSettings | None = None,
        region: Region | None = None,
        clock: Callable[[], float] = time.monotonic,
        bodies: BodyLimits | None = None,
        *,
        accounts: Accounts | None = None,
    ) -> None:
        self._app = app
        settings = settings or VllmSettings.of_environment()
        self._clock = clock
        self._admission = Admission(settings)
        api_key = os.environ.get("VLLM_API_KEY", "")
        self._grants = GrantGate(settings.grants_file, api_key)
        self._shared_state = SharedState(
            region or Region.of_environment(), self._admission, self._grants
        )
        self._bodies = BodyBudget(bodies or BodyLimits())
        self._dispatcher = Dispatcher(
            self._admission, self._shared_state, self._bodies, self._grants, clock
        )
        self._lane = Lane()
        self._max_sequences = settings.max_sequences
        self._access = Access(settings.internal_token, api_key)
        self._accounts = accounts or Accounts.of_environment()
        if self._accounts is not None:
            install(self._accounts)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one connection's scope.

        Not a coroutine of its own: a stream would wake it with each token.
        """
        self._dispatcher.start()
        if scope["type"] == "http":
            return self._http(scope, receive, send)
        if scope["type"] == "lifespan":
            return self._app(scope, receive, send)
        return send({"type": "websocket.close", "code": 1008})

    def _http(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        route = route_of(scope["method"], scope["path"])
        headers = first_headers(scope)
        if self._access.is_internal(headers):
            return self._app(without_headers(scope, (INTERNAL,), []), receive, send)
        if route is Route.UNKNOWN or (route is Route.LOOPBACK and not is_from_loopback(scope)):
            self._shared_state.rejected += 1
            return answer(send, 404, unknown_path(scope["path"]))
        if route in (Route.OPEN, Route.LOOPBACK) or scope["method"] == "OPTIONS":
            return self._app(scope, receive, send)
        try:
            granted = self._grants.admit(scope, _purpose(route, scope["path"]))
        except (GrantRefusedError, GrantsFullError) as refusal:
            return self._refuse_grant(send, refusal)
        if granted is not None:
            scope = granted
        elif not self._access.is_authorized(headers):
            self._shared_state.unauthorized += 1
            return answer(send, 401, UNAUTHORIZED)
        return self._authorized(route, scope, headers, receive, send)

    def _authorized(
        self,
        route: Route,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        send: Send,
    ) -> Awaitable[None]:
        if route is Route.GENERATION:
            return self._generation(scope, headers, receive, send)
        if route is Route.TOKENIZER:
            return self._tokenizer(scope, headers, receive, send)
        use(scope)
        return self._app(scope, receive, send)

    def _refuse_grant(
        self, send: Send, refusal: GrantRefusedError | GrantsFullError
    ) -> Awaitable[None]:
        self._dispatcher.publish_soon()
        if isinstance(refusal, GrantRefusedError):
            return answer(send, 401, refusal.body)
        self._shared_state.rejected += 1
        return answer(send, 429, GRANTS_FULL, [(b"retry-after", b"1")])

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
            release(scope)

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
        dispatcher = self._dispatcher
        reply = Reply(send, dispatcher.publish_before_end, self._timer(ticket, shape, scope))
        task = asyncio.current_task()
        try:
            dispatcher.publish_soon()
            priority = ticket.priority
            if priority is None:
                priority = await dispatcher.released(ticket, inbox)
            if priority is not None:
                if task is not None:
                    dispatcher.running[ticket] = task
                intake.body = with_priority(intake.body, shape, priority)
                scope = _with_priority_header(scope, priority, len(intake.body))
                inbox.replay(intake)
                use(scope)
                await self._accounted(ticket, scope, inbox, reply)
            elif ticket in dispatcher.aborted:
                await answer(send, 503, DRAINED, CLOSE)
        except asyncio.CancelledError:
            if task is None or not dispatcher.is_cancelled(ticket):
                raise
            task.uncancel()
            await reply.abort()
        finally:
            dispatcher.finish(ticket)

    async def _accounted(self, ticket: Ticket, scope: Scope, inbox: Inbox, reply: Reply) -> None:
        """Let vLLM answer, with an account for the tokens."""
        if self._accounts is None:
            await self._app(scope, inbox.receive, reply.send)
            return
        account = self._accounts.open(identity_of(scope), ticket.tier)
        outside = CURRENT.set(account)
        try:
            await self._app(scope, inbox.receive, reply.send)
        except BaseException:
            account.aborted = True
            raise
        finally:
            CURRENT.reset(outside)
            self._accounts.end(account)

    def _timer(self, ticket: Ticket, shape: Shape, scope: Scope) -> StreamTimer | None:
        stream = stream_of(scope["path"])
        if stream is None:
            return None
        return StreamTimer(
            self._shared_state.latencies,
            ticket.tier,
            ticket.arrival_us / 1e6,
            stream,
            self._clock,
            gaps=shape.sequences == 1,
        )

    async def _enqueued(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        inbox: Inbox,
        send: Send,
        intake: Intake,
    ) -> tuple[Ticket, Shape] | None:
        """Return a request's ticket and shape; None if it was answered here."""
        arrived = self._clock()
        identity = identity_of(scope)
        name = headers.get(_TIER, b"")
        # A grant says the tier. The header may be anybody's.
        tier = tier_of(name) if identity is None else identity.tier
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
            body = await intake.read(inbox.client, headers.get(b"content-length"))
            shape = shape_of(body, scope["path"])
            check_sequences(shape, scope["path"], self._max_sequences)
        except ClientGone:
            return None
        except RefusedBodyError as error:
            self._shared_state.rejected += 1
            await refuse_body(send, error)
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
            body = await intake.read(inbox.client, headers.get(b"content-length"))
            shape_of(body, scope["path"])
            if not await self._lane.acquire(inbox):
                return
            place = LanePlace(self._lane, send)
            try:
                inbox.replay(intake)
                use(scope)
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
            release(scope)

    async def _refuse(self, send: Send, refusal: Refusal) -> None:
        self._dispatcher.publish_soon()
        self._dispatcher.publish_before_end(False)
        if refusal.outcome is Outcome.DRAINING:
            await answer(send, 503, DRAINED, CLOSE)
            return
        headers = [(b"retry-after", str(refusal.retry_after_s).encode())]
        if refusal.outcome is Outcome.TIER_CLOSED:
            headers.append(SHED)
        await answer(send, 429, refused_body(refusal), headers)


def _purpose(route: Route, path: str) -> str:
    """Return the purpose of a request's grant: one generation for all generating paths, or a tokenizer path."""
    return path if route is Route.TOKENIZER else route.value


def tier_of(name: bytes) -> Tier | None:
    """Return the tier that a header's value means; None if it is unknown."""
    return _TIERS.get(name.strip().lower()) if name else Tier.STANDARD


def _with_priority_header(scope: Scope, priority: int, length: int) -> Scope:
    # vLLM lets a header override the body's priority, so ours replaces the client's in both.
    own: Headers = [
        (b"x-vllm-priority", str(priority).encode()),
        (b"content-length", str(length).encode()),
    ]
    return without_headers(scope, _PRIORITY_HEADERS, own)
