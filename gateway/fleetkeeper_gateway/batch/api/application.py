"""The ASGI application of the API."""

from __future__ import annotations

import time
from collections import defaultdict

from starlette.applications import Starlette
from starlette.routing import Route

from fleetkeeper_gateway.batch.api.batches import BatchCalls
from fleetkeeper_gateway.batch.api.call import Call, Handler
from fleetkeeper_gateway.batch.api.files import FileCalls
from fleetkeeper_gateway.batch.api.key_state import KeyState
from fleetkeeper_gateway.batch.api.parts import ApiParts
from fleetkeeper_gateway.batch.api.upload import UploadCalls
from fleetkeeper_gateway.http.asgi import Receive, Scope, Send
from fleetkeeper_gateway.http.errors import unknown_path, wrong_method


class Endpoint:
    """The methods of a path, as an ASGI callable."""

    def __init__(
        self, parts: ApiParts, keys: defaultdict[str, KeyState], **handlers: Handler
    ) -> None:
        self._parts = parts
        self._keys = keys
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await Call(self._parts, self._keys, scope, receive, send).run(self._handle)

    async def _handle(self, call: Call) -> object:
        call.key.take_call(self._parts.settings.batch_key_calls, time.monotonic())
        method = call.scope["method"]
        if not self._handlers:
            raise unknown_path(call.scope["path"])
        handler = self._handlers.get(method)
        if handler is None:
            raise wrong_method(method, ", ".join(sorted(self._handlers)))
        return await handler(call)


def create_app(parts: ApiParts) -> Starlette:
    """Return the application of files and batches.

    The server's connections must be those of `http.connection`. They bound heads and idle clients, and
    abort a broken answer visibly, so that no client mistakes it for complete.
    """
    keys: defaultdict[str, KeyState] = defaultdict(KeyState)
    uploads, files, batches = UploadCalls(parts), FileCalls(parts), BatchCalls(parts)
    return Starlette(
        routes=[
            Route("/v1/files", Endpoint(parts, keys, GET=files.list, POST=uploads.create)),
            Route("/v1/files/{id}", Endpoint(parts, keys, GET=files.get, DELETE=files.delete)),
            Route("/v1/files/{id}/content", Endpoint(parts, keys, GET=files.content)),
            Route("/v1/batches", Endpoint(parts, keys, GET=batches.list, POST=batches.create)),
            Route("/v1/batches/{id}", Endpoint(parts, keys, GET=batches.get)),
            Route("/v1/batches/{id}/cancel", Endpoint(parts, keys, POST=batches.cancel)),
            Route("/{path:path}", Endpoint(parts, keys)),
        ]
    )
