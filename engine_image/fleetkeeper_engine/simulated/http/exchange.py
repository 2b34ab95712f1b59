"""One HTTP request: what routes read of it, and how they answer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from http import HTTPStatus

from fleetkeeper_engine.in_vllm.http.asgi import Headers, Receive, Scope, Send, first_headers
from fleetkeeper_engine.simulated.engine import Engine
from fleetkeeper_engine.simulated.http.errors import unknown_model
from fleetkeeper_engine.simulated.processor import LoRARequest


class ClientGoneError(Exception):
    """The client hung up."""


class Exchange:
    """One request and its answer."""

    def __init__(self, engine: Engine, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = first_headers(scope)
        self._engine = engine
        self._receive = receive
        self._send = send
        self._id = self.headers.get(b"x-request-id", b"").decode("latin-1") or secrets.token_hex(8)

    @property
    def media_type(self) -> str:
        """Return the type of the body."""
        return self.headers.get(b"content-type", b"").decode("latin-1")

    def request_id(self, kind: str) -> str:
        """Return the ID of the request in the engine and in the answer."""
        return f"{kind}-{self._id}"

    def check_model(self, name: str | None) -> None:
        """Check that a model is served.

        Raises:
            RefusedRequestError: 404, if it is not.
        """
        options = self._engine.options
        if name and name not in options.served_model_names and name not in options.adapters:
            raise unknown_model(name, ", ".join(options.served_model_names))

    def adapter(self, name: str | None) -> LoRARequest | None:
        """Return the adapter that a model's name means; None for the model itself."""
        return LoRARequest(name) if name in self._engine.options.adapters else None

    async def body(self) -> bytes:
        """Return the whole body.

        Raises:
            ClientGoneError: if the client hung up before its end.
        """
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    async def hung_up(self) -> None:
        """Return when the client has hung up."""
        while (await self._receive())["type"] != "http.disconnect":
            continue

    async def answer(
        self, status: HTTPStatus, body: str | bytes = b"", media_type: str = "application/json"
    ) -> None:
        """Send a whole answer."""
        data = body.encode("utf-8", "replace") if isinstance(body, str) else body
        headers = [(b"content-length", str(len(data)).encode())]
        if data:
            headers.append((b"content-type", media_type.encode()))
        await self.begin(status, headers)
        await self.send(data, more=False)

    async def begin(self, status: HTTPStatus, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers."""
        sent: Headers = list(headers)
        await self._send({"type": "http.response.start", "status": status.value, "headers": sent})

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
