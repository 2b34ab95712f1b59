"""A request to a service, from its head to the last byte of its answer."""

from __future__ import annotations

import asyncio
import math
import traceback
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp
import structlog

from fleetkeeper_contract.grants import GRANT_BAGGAGE_KEY
from fleetkeeper_contract.headers import REQUEST_ID_HEADER, TIER_HEADER
from fleetkeeper_contract.sleep import SleepState
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.http.answers import refuse
from fleetkeeper_gateway.http.asgi import ClientGone, Headers, Receive, Scope, Send, address_of
from fleetkeeper_gateway.http.baggage import next_hop, split_baggage
from fleetkeeper_gateway.http.client_headers import (
    CLIENT_REQUEST_ID_HEADER,
    ClientHeaders,
    parse_headers,
    response_headers,
)
from fleetkeeper_gateway.http.connections.bodies import Body
from fleetkeeper_gateway.http.connections.connection import connection_of
from fleetkeeper_gateway.http.errors import (
    LIMIT_REACHED,
    SERVER,
    Refusal,
    hold_refused,
    key_refused,
    limit_refused,
    unavailable,
)
from fleetkeeper_gateway.http.open_requests import OpenRequest
from fleetkeeper_gateway.http.parts import Gateway
from fleetkeeper_gateway.http.paths import SENT_AS, TOKENIZES
from fleetkeeper_gateway.http.request_fields import parse_fields
from fleetkeeper_gateway.http.routing import choose_service, choose_tier
from fleetkeeper_gateway.interfaces import (
    Admission,
    Demand,
    HoldRefused,
    Key,
    KeyRefused,
    LimitRefused,
    Service,
)
from fleetkeeper_gateway.telemetry import metrics
from fleetkeeper_gateway.upstream.attempts import (
    SHORT_WAIT_S,
    Attempt,
    NotSent,
    Opened,
    SendFailed,
)
from fleetkeeper_gateway.upstream.flood import FloodError
from fleetkeeper_gateway.upstream.not_sent import SHED

logger: structlog.stdlib.BoundLogger = structlog.get_logger("fleetkeeper_gateway.http")

Sender = Callable[[float | None, Callable[[], None] | None], Awaitable[Opened]]
"""Sends the request. It gets `wait_s` and `connected` of `Upstream.open`."""

CLIENT_CLOSED: Final = 499
"""Status in the audit log of a request whose client got no status."""
FLOOD_BYTES: Final = 4 * 1024**2
"""Bytes that an answer aborted as a flood adds to the refused bytes. A well-behaved service sends no flood."""
_RETRY_S: Final = 5
_LONG_RETRY_S: Final = 30
_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
_CLIENT_REQUEST_ID = CLIENT_REQUEST_ID_HEADER.lower().encode()


class UpstreamLost(Exception):
    """A service's answer broke off."""


class Exchange:
    """One request and its answer."""

    def __init__(
        self, gateway: Gateway, scope: Scope, receive: Receive, send: Send, path: str
    ) -> None:
        self._gateway = gateway
        self._scope = scope
        self._receive = receive
        self._send = send
        self._path = path
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an exchange runs in a task")
        self._open = OpenRequest(task, self._loop.time())
        self._connection = connection_of(scope)
        self._id = uuid.uuid4().hex
        self._body = Body(
            gateway.bodies, gateway.settings.request_bytes, gateway.settings.client_timeout_seconds
        )
        self._headers = ClientHeaders()
        self._key: Key | None = None
        self._key_id: str | None = None
        self._source = address_of(scope)
        """Source that a refusal is counted for: the client's address until its key is known."""
        self._tier: Tier | None = None
        self._service: Service | None = None
        self._model: str | None = None
        self._admission: Admission | None = None
        self._prompt_tokens = 0
        """Estimated tokens of the prompt."""
        self._is_held = False
        """True once the request waited for a service that sleeps."""
        self._was_refused = False
        """True once no replica took an attempt."""
        self._sent = False
        """True once a service may have worked on the request."""
        self._started = False
        """True once the head of an answer was sent to the client."""
        self._answered = False
        """True once a part of a service's answer arrived."""
        self._outcome = "ok"
        self._status = CLIENT_CLOSED

    async def run(self) -> None:
        """Serve the request."""
        self._connection.lost = self._open.abort
        self._gateway.open_requests.add(self._open)
        try:
            await self._serve()
        except asyncio.CancelledError:
            if self._open.reason is None:
                raise
            self._open.task.uncancel()
            await self._aborted(self._open.reason)
        finally:
            self._stop_watching()
            self._body.release()
            try:
                self._record()
            finally:
                await self._release()

    async def _serve(self) -> None:
        try:
            await self._forward(await self._opened())
        except Refusal as refusal:
            await self._refuse(refusal)
        except KeyRefused as error:
            self._key_id = error.key_id
            await self._refuse(key_refused(error))
        except LimitRefused as error:
            await self._refuse(limit_refused(error))
        except HoldRefused as error:
            await self._refuse(hold_refused(error, self._model or ""))
        except NotSent as error:
            await self._refuse(self._not_sent(error))
        except SendFailed as error:
            self._count_flood(error)
            self._warn("request failed after it was sent", str(error))
            await self._refuse(
                _failed("The service did not answer properly after the request was sent.")
            )
        except ClientGone:
            self._outcome = "client_gone"
        except UpstreamLost as error:
            self._count_flood(error)
            self._warn("answer ended early", str(error))
            self._end_early("upstream_lost")
            self._connection.close()
        except Exception as error:  # noqa: BLE001 - the message of an unknown one may hold a prompt
            logger.error(  # noqa: TRY400
                "request failed",
                request=self._id,
                error=type(error).__name__,
                stack="".join(traceback.format_tb(error.__traceback__)),
            )
            self._outcome = "internal_error"
            await self._fail()

    async def _opened(self) -> Opened:
        """Check the request, send it, and return the beginning of its answer."""
        gateway = self._gateway
        self._headers = headers = parse_headers(self._scope["headers"])
        caller = gateway.authenticate(headers.authorization)
        self._connection.accept()
        key = self._key = caller.key
        self._key_id = self._open.key_id = key.id
        # A key's batches may name any model. Their refusals do not stop its other requests.
        self._source = f"batch of {key.id}" if caller.in_batch else f"key {key.id}"
        gateway.refused.check(self._source)
        tier = self._tier = Tier.BATCH if caller.in_batch else choose_tier(headers.tier, key)
        gateway.parts.limiter.check(key, tier)
        if headers.encoding not in ("", "identity"):
            raise Refusal(
                415, "encoding_not_supported", "Send the body without a Content-Encoding."
            )
        body = self._body
        await body.read(self._receive, headers.content_length, key.tenant)
        fields = parse_fields(body.data, body.json, self._path)
        service = choose_service(gateway.parts.services, key, fields.model, headers.service)
        self._service, self._model = service, fields.model
        self._check_floods(service)
        baggage, grants = split_baggage(headers.baggage) if headers.baggage else ([], [])
        hops = next_hop(grants, gateway.parts.grants) if grants else 1
        tokens = gateway.parts.estimate(*fields.asked)
        self._prompt_tokens = gateway.parts.estimate(fields.asked.prompt_bytes, 0, 1)
        self._admission = await gateway.parts.limiter.admit(Demand(key, tier, self._id, tokens))
        sending = self._loop.time()
        metrics.until_sent(tier.label).observe(sending - self._open.arrived)

        def send(wait_s: float | None, connected: Callable[[], None] | None) -> Awaitable[Opened]:
            return gateway.upstream.open(
                SENT_AS.get(self._path, self._path),
                self._scope["query_string"].decode("latin-1"),
                body.data,
                lambda: self._attempt(key, tier, baggage, hops),
                self._sending,
                wait_s=wait_s,
                connected=connected,
            )

        asleep: Service | None = None
        try:
            # Hundreds of waiting lines would take the processor from other keys. The batch process sends a
            # refused line again.
            opened = await send(SHORT_WAIT_S if caller.in_batch else None, None)
        except NotSent:
            asleep = self._present()
            if asleep is None or not self._is_to_wait(asleep, tier):
                raise
        if asleep is not None:
            if not self._may_be_held(tier):
                wakes = caller.in_batch and headers.wake is not None
                raise gateway.parts.hold.refusal(asleep, wakes=wakes)
            opened = await self._held(asleep, key, tier, fields.model, send)
        metrics.until_answered(tier.label).observe(self._loop.time() - sending)
        return opened

    async def _held(
        self, service: Service, key: Key, tier: Tier, model: str, send: Sender
    ) -> Opened:
        """Send the request once its service takes it."""
        body, hold = self._body, self._gateway.parts.hold
        with hold.place(service, tier, key.tenant, model, body.size) as place:
            body.leave_budget()
            self._is_held = True
            while True:
                await place.turn()
                try:
                    return await send(0, place.connected)
                except NotSent as error:
                    place.refused(is_shed=error.reason == SHED)

    def _may_be_held(self, tier: Tier) -> bool:
        return tier is not Tier.BATCH and self._path not in TOKENIZES

    def _is_to_wait(self, service: Service, tier: Tier) -> bool:
        """Return whether a service sleeps, or requests of earlier arrival are still held for it.

        While its only replica is replaced, the old one continues. A request waits once it was not taken.
        """
        sleep = service.sleep
        if sleep is not None and (sleep.state is not SleepState.SWAPPING or self._was_refused):
            return True
        holding = self._gateway.parts.hold.holding
        return bool(holding) and service.path in holding and self._may_be_held(tier)

    def _present(self) -> Service | None:
        """Return the service in its present state; None if it is gone or has no address."""
        if self._service is None:
            return None
        service = self._gateway.parts.services.named(self._service.namespace, self._service.name)
        return service if service is not None and service.url else None

    def _sending(self, may_be_sent: bool) -> None:
        self._sent = may_be_sent
        self._was_refused = self._was_refused or not may_be_sent

    def _attempt(self, key: Key, tier: Tier, baggage: list[str], hops: int) -> Attempt | None:
        """Return the request for the next attempt. Its service may have changed since the last attempt."""
        service = self._present()
        if service is None or (not self._is_held and self._is_to_wait(service, tier)):
            return None
        self._service = service
        headers = [
            *self._headers.forwarded,
            (TIER_HEADER, tier.label),
            (REQUEST_ID_HEADER, self._id),
        ]
        if self._headers.request_id is not None:
            headers.append((CLIENT_REQUEST_ID_HEADER, self._headers.request_id))
        grant = self._grant(service, key, tier, hops)
        if grant is not None:
            headers.append(("Authorization", f"Bearer {grant}"))
            baggage = [*baggage, f"{GRANT_BAGGAGE_KEY}={grant}"]
        if baggage:
            headers.append(("baggage", ",".join(baggage)))
        return Attempt(service, headers)

    def _grant(self, service: Service, key: Key, tier: Tier, hops: int) -> str | None:
        """Return a grant, also for a service that does not demand grants.

        After a change of spec.access an engine may still demand grants, or already not. It accepts a
        grant in both cases, and counts usage by key. Without a signing key, a service that demands no
        grant gets none.
        """
        try:
            return self._gateway.parts.signer.sign(
                service,
                tier=tier,
                key_id=key.id,
                request_id=self._id,
                hops=hops,
            )
        except RuntimeError as error:
            if not service.demands_grant:
                return None
            self._warn("no grant can be signed", str(error))
            raise unavailable(
                "grants_unavailable",
                f"{service.path} demands a grant, and the gateway has no key to sign one.",
                _LONG_RETRY_S,
            ) from error

    async def _forward(self, opened: Opened) -> None:
        """Forward the answer, part by part."""
        response = opened.response
        self._body.release()
        try:
            self._status = response.status
            self._started = True
            if _is_refused(response.status):
                self._sent = False
            await self._send(
                {
                    "type": "http.response.start",
                    "status": response.status,
                    "headers": response_headers(response.raw_headers, self._own_headers()),
                }
            )
            if opened.complete:
                await self._release()
                await self._send(
                    {"type": "http.response.body", "body": opened.first, "more_body": False}
                )
            else:
                await self._forward_parts(response.content)
        finally:
            # A response that was read to its end gave its connection back already.
            response.close()

    async def _forward_parts(self, content: aiohttp.StreamReader) -> None:
        open_request, send, time_of_loop = self._open, self._send, self._loop.time
        while True:
            open_request.waiting_since = time_of_loop()
            try:
                part = await content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise UpstreamLost(type(error).__name__) from error
            open_request.waiting_since = math.inf
            self._answered = self._answered or bool(part)
            is_last = content.at_eof()
            if is_last:
                await self._release()
            await send({"type": "http.response.body", "body": part, "more_body": not is_last})
            if is_last:
                return

    async def _release(self) -> None:
        """Release the reservation of the limits. Idempotent.

        It runs before the last part is sent: a client whose concurrency is 1 may send its next
        request at once.
        """
        if self._admission is None:
            return
        # An engine counts a prompt with its first token. Without this, a client that disconnects just before
        # would get its prompt computed free of charge.
        hung_up = self._open.reason == "client_gone" and not self._answered
        least = self._prompt_tokens if hung_up else 0
        await self._admission.release(sent=self._sent, least=least)

    async def _aborted(self, reason: str) -> None:
        """End an aborted request: with an error, or by a visible abort if its answer has begun."""
        refusal = _ABORTS.get(reason)
        if refusal is None or self._started:
            self._end_early(reason)
            self._connection.abort()
            return
        self._stop_watching()
        if reason == "draining" and self._sent:
            # This 503 states that nothing was sent, also to a gateway before this one.
            await self._refuse(_failed("The gateway ended after the request was sent."))
            return
        status, code, message, kind = refusal
        headers = {"retry-after": "1"} if status == 503 else None
        await self._refuse(Refusal(status, code, message, kind=kind, headers=headers))

    def _stop_watching(self) -> None:
        self._gateway.open_requests.remove(self._open)
        if self._connection.lost == self._open.abort:
            self._connection.lost = None

    async def _refuse(self, refusal: Refusal) -> None:
        self._started = True
        self._outcome, self._status = refusal.code, refusal.status
        metrics.REFUSED.labels(refusal.code).inc()
        refused = self._gateway.refused
        is_excess = refused.wait_s(self._source) > 0
        # Refusing an unread body costs next to nothing, so it is not counted. A client far above its limit
        # keeps its connection.
        is_unread_limit = refusal.code == LIMIT_REACHED and not self._body.size
        if not is_excess and 400 <= refusal.status < 500 and not is_unread_limit:
            refused.add(self._source, self._body.size)
        await refuse(
            self._send,
            self._receive,
            refusal,
            self._own_headers(),
            unread=self._body.more,
            close=is_excess,
        )

    async def _fail(self) -> None:
        if self._started:
            self._end_early("internal_error")
            self._connection.abort()
            return
        await self._refuse(
            Refusal(500, "internal_error", "The gateway failed. Its log says why.", kind=SERVER)
        )

    def _end_early(self, reason: str) -> None:
        self._outcome = reason
        metrics.ABORTED.labels(reason).inc()

    def _own_headers(self) -> Headers:
        headers: Headers = [(_REQUEST_ID, self._id.encode())]
        if self._headers.request_id is not None:
            headers.append((_CLIENT_REQUEST_ID, self._headers.request_id.encode()))
        if self._admission is not None:
            for name, value in self._admission.headers.items():
                headers.append((name.encode("latin-1"), value.encode("latin-1")))
        return headers

    def _check_floods(self, service: Service) -> None:
        """Check that a service may get requests.

        Raises:
            Refusal: if too many of its answers were aborted as floods.
        """
        wait_s = self._gateway.refused.wait_s(_flood_of(service))
        if wait_s > 0:
            raise unavailable(
                "service_unavailable",
                f"Too many answers of {service.path} were cut, because they were floods of chunks or "
                "interim answers. The request was not sent.",
                math.ceil(wait_s),
            )

    def _count_flood(self, error: Exception) -> None:
        """Count an answer that was aborted as a flood. A service with many such answers gets fewer requests."""
        if self._service is not None and isinstance(error.__cause__, FloodError):
            self._gateway.refused.add(_flood_of(self._service), FLOOD_BYTES)

    def _not_sent(self, error: NotSent) -> Refusal:
        path = self._service.path if self._service is not None else ""
        self._warn("no replica took the request", error.reason)
        return unavailable(
            "service_unavailable",
            f"No replica of {path} takes requests now ({error.reason}). Try again in {_RETRY_S} s.",
            _RETRY_S,
        )

    def _warn(self, event: str, reason: str) -> None:
        service = self._service.path if self._service is not None else None
        logger.warning(event, request=self._id, service=service, reason=reason)

    def _record(self) -> None:
        service = self._service.path if self._service is not None else None
        tier = self._tier.label if self._tier is not None else None
        if self._outcome == "ok" and service is not None and tier is not None:
            metrics.requests(service, tier, self._status).inc()
        self._gateway.parts.audit.request(
            key_id=self._key_id,
            request_id=self._id,
            service=service,
            model=self._model,
            tier=tier,
            outcome=self._outcome,
            status=self._status,
            client=address_of(self._scope),
        )


def _is_refused(status: int) -> bool:
    """Return whether a service's answer states that it did not work on the request.

    The estimate of such a request is released at once: the usage process never settles a shed request.
    """
    return 400 <= status < 500 or status == 503


def _flood_of(service: Service) -> str:
    return f"floods of {service.path}"


def _failed(what: str) -> Refusal:
    return Refusal(502, "upstream_failed", f"{what} It may have been worked on.", kind=SERVER)


_ABORTS: Final = {
    "key_revoked": (
        401,
        "invalid_api_key",
        "The key is no longer valid.",
        "invalid_request_error",
    ),
    "timeout": (504, "request_timeout", "The request took longer than the gateway allows.", SERVER),
    "draining": (503, "draining", "The gateway is shutting down. Send the request again.", SERVER),
}
"""Refusals for aborts, if no answer has begun."""
