"""The ASGI application of the request port."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable
from typing import Final

from fleetkeeper_contract.headers import REQUEST_ID_HEADER
from fleetkeeper_gateway.http.answers import answer_json, refuse
from fleetkeeper_gateway.http.asgi import Headers, Receive, Scope, Send, address_of
from fleetkeeper_gateway.http.client_headers import parse_headers
from fleetkeeper_gateway.http.connections.connection import connection_of
from fleetkeeper_gateway.http.errors import (
    Refusal,
    key_refused,
    stateful,
    unknown_path,
    wrong_method,
)
from fleetkeeper_gateway.http.exchange import Exchange
from fleetkeeper_gateway.http.parts import Gateway
from fleetkeeper_gateway.http.paths import INFERENCE, MODELS, RESPONSES
from fleetkeeper_gateway.http.routing import describe_model, list_models
from fleetkeeper_gateway.interfaces import KeyRefused
from fleetkeeper_gateway.telemetry import metrics

_BODY_HEADERS: Final = frozenset({b"content-length", b"transfer-encoding"})
_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()


class Application:
    """Requests to services, and the list of models."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request."""
        path = scope["path"]
        if path in INFERENCE and scope["method"] == "POST":
            return Exchange(self._gateway, scope, receive, send, path).run()
        return self._other(scope, receive, send)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = uuid.uuid4().hex
        headers: Headers = [(_REQUEST_ID, request_id.encode())]
        key_id, refusal, body = None, None, None
        try:
            parsed = parse_headers(scope["headers"])
            key = self._gateway.authenticate(parsed.authorization).key
            key_id = key.id
            connection_of(scope).accept()
            _check_path(scope["path"], scope["method"])
            services = self._gateway.parts.services
            name = scope["path"][len(MODELS) + 1 :]
            body = describe_model(services, key, name) if name else list_models(services, key)
        except Refusal as error:
            refusal = error
        except KeyRefused as error:
            key_id, refusal = error.key_id, key_refused(error)
        self._record(scope, request_id, key_id, refusal)
        if refusal is None:
            await answer_json(send, body, headers)
            return
        metrics.REFUSED.labels(refusal.code).inc()
        unread = any(name in _BODY_HEADERS for name, _ in scope["headers"])
        source = f"key {key_id}" if key_id is not None else address_of(scope)
        is_excess = self._gateway.refused.wait_s(source) > 0
        if not is_excess and refusal.status < 500:
            self._gateway.refused.add(source, 0)
        await refuse(send, receive, refusal, headers, unread=unread, close=is_excess)

    def _record(
        self, scope: Scope, request_id: str, key_id: str | None, refusal: Refusal | None
    ) -> None:
        self._gateway.parts.audit.request(
            key_id=key_id,
            request_id=request_id,
            service=None,
            model=None,
            tier=None,
            outcome=refusal.code if refusal is not None else "ok",
            status=refusal.status if refusal is not None else 200,
            client=address_of(scope),
        )


def _check_path(path: str, method: str) -> None:
    """Check that a request asks for models.

    Raises:
        Refusal: if it does not.
    """
    if path in INFERENCE:
        raise wrong_method(method, "POST")
    if path.startswith(RESPONSES):
        raise stateful(None)
    if path != MODELS and not path.startswith(MODELS + "/"):
        raise unknown_path(path)
    if method != "GET":
        raise wrong_method(method, "GET")
