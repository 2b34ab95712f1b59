"""The application that a server runs."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from fleetkeeper_gateway.batch.api.batches import BatchCalls
from fleetkeeper_gateway.batch.api.call import Call, Handler
from fleetkeeper_gateway.batch.api.files import FileCalls
from fleetkeeper_gateway.batch.api.parts import ApiParts
from fleetkeeper_gateway.batch.api.per_key import PerKey
from fleetkeeper_gateway.batch.api.upload import UploadCalls
from fleetkeeper_gateway.http.asgi import Receive, Scope, Send
from fleetkeeper_gateway.http.errors import unknown_path, wrong_method


class Endpoint:
    """A path with its methods, as an ASGI callable."""

    def __init__(self, parts: ApiParts, **handlers: Handler) -> None:
        self._parts = parts
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await Call(self._parts, scope, receive, send).run(self._handle)

    async def _handle(self, call: Call) -> object:
        method = call.scope["method"]
        if not self._handlers:
            raise unknown_path(call.scope["path"])
        handler = self._handlers.get(method)
        if handler is None:
            raise wrong_method(method, ", ".join(sorted(self._handlers)))
        return await handler(call)


def create_app(parts: ApiParts) -> Starlette:
    """Return the application of files and batches.

    The server's connections must be those of `http.connection`: they bound heads and idle clients, and
    an answer that breaks is ended by them, so that no client takes it for complete.
    """
    per_key = PerKey()
    uploads, files = UploadCalls(parts, per_key), FileCalls(parts, per_key)
    batches = BatchCalls(parts, per_key)
    return Starlette(
        routes=[
            Route("/v1/files", Endpoint(parts, GET=files.list, POST=uploads.create)),
            Route("/v1/files/{id}", Endpoint(parts, GET=files.get, DELETE=files.delete)),
            Route("/v1/files/{id}/content", Endpoint(parts, GET=files.content)),
            Route("/v1/batches", Endpoint(parts, GET=batches.list, POST=batches.create)),
            Route("/v1/batches/{id}", Endpoint(parts, GET=batches.get)),
            Route("/v1/batches/{id}/cancel", Endpoint(parts, POST=batches.cancel)),
            Route("/{path:path}", Endpoint(parts)),
        ]
    )
