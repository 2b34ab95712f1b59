"""The routes of a simulated engine."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fleetkeeper_engine.in_vllm.http.asgi import App, Receive, Scope, Send
from fleetkeeper_engine.simulated.engine import Engine, imported
from fleetkeeper_engine.simulated.http.answers import to_json
from fleetkeeper_engine.simulated.http.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
    parse_body,
)
from fleetkeeper_engine.simulated.http.chat_template import rendered
from fleetkeeper_engine.simulated.http.errors import (
    RefusedRequestError,
    error_body,
    invalid,
)
from fleetkeeper_engine.simulated.http.exchange import ClientGoneError, Exchange
from fleetkeeper_engine.simulated.http.generation import DEAD, embed, generate
from fleetkeeper_engine.simulated.processor import EngineDeadError
from fleetkeeper_engine.simulated.simulation_settings import VERSION_TEXT
from fleetkeeper_engine.simulated.tokens import BOS, decode, encode, token_text

logger = logging.getLogger("vllm.fleetkeeper")

Route = Callable[[Exchange], Awaitable[None]]


class Api:
    """vLLM's routes as an ASGI application."""

    def __init__(self, engine: Engine, api_keys: tuple[str, ...]) -> None:
        self._engine = engine
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._started = int(time.time())
        routes: dict[str, tuple[str, Route]] = {
            "/health": ("GET", self._health),
            "/ping": ("GET", self._health),
            "/version": ("GET", self._version),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }
        if engine.options.pooling:
            routes["/v1/embeddings"] = ("POST", self._embeddings)
        else:
            routes["/v1/completions"] = ("POST", self._completions)
            routes["/v1/chat/completions"] = ("POST", self._chat)
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(self._engine, scope, receive, send)
        path = scope["path"]
        if self._keys and path.startswith("/v1") and not self._is_authorized(exchange):
            await exchange.answer(HTTPStatus.UNAUTHORIZED, '{"error":"Unauthorized"}')
            return
        method, route = self._routes.get(path, ("", None))
        if route is None:
            await exchange.answer(HTTPStatus.NOT_FOUND, '{"detail":"Not Found"}')
        elif scope["method"] != method:
            await exchange.answer(HTTPStatus.METHOD_NOT_ALLOWED, '{"detail":"Method Not Allowed"}')
        else:
            await self._guarded(route, exchange)

    async def _guarded(self, route: Route, exchange: Exchange) -> None:
        try:
            await route(exchange)
        except ClientGoneError:
            return
        except RefusedRequestError as refusal:
            await exchange.answer(refusal.status, refusal.body())
        except EngineDeadError:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            await exchange.answer(status, error_body(DEAD, "InternalServerError", status))

    def _is_authorized(self, exchange: Exchange) -> bool:
        scheme, _, key = exchange.headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key).digest()
        known = [hmac.compare_digest(digest, expected) for expected in self._keys]
        return scheme.lower() == b"bearer" and any(known)

    async def _health(self, exchange: Exchange) -> None:
        alive = self._engine.dead is None
        await exchange.answer(HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _version(self, exchange: Exchange) -> None:
        await exchange.answer(HTTPStatus.OK, to_json({"version": VERSION_TEXT}))

    async def _metrics(self, exchange: Exchange) -> None:
        engine = self._engine
        text = engine.series.render(engine.gauges(), engine.core.lateness)
        await exchange.answer(HTTPStatus.OK, text, "text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, exchange: Exchange) -> None:
        options = self._engine.options
        base = options.served_model_names[0]
        cards = [
            self._card(name, options.model, None, options.max_model_len)
            for name in options.served_model_names
        ]
        cards += [self._card(name, path, base, None) for name, path in options.adapters.items()]
        await exchange.answer(HTTPStatus.OK, to_json({"object": "list", "data": cards}))

    def _card(
        self, name: str, root: str, parent: str | None, length: int | None
    ) -> dict[str, object]:
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": self._started,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": length,
            "permission": [permission],
        }

    async def _completions(self, exchange: Exchange) -> None:
        body = parse_body(CompletionBody, await exchange.body(), exchange.media_type)
        await generate(self._engine, body, exchange)

    async def _chat(self, exchange: Exchange) -> None:
        body = parse_body(ChatBody, await exchange.body(), exchange.media_type)
        await generate(self._engine, body, exchange)

    async def _embeddings(self, exchange: Exchange) -> None:
        body = parse_body(EmbeddingBody, await exchange.body(), exchange.media_type)
        await embed(self._engine, body, exchange)

    async def _tokenize(self, exchange: Exchange) -> None:
        body = parse_body(TokenizeBody, await exchange.body(), exchange.media_type)
        exchange.check_model(body.model)
        options = self._engine.options
        if body.messages is not None:
            tokens = rendered(
                body.messages, options.served_model_names[0], asks=body.add_generation_prompt
            )
        elif body.prompt is not None:
            tokens = encode(body.prompt)
            if body.add_special_tokens is not False:
                tokens.insert(0, BOS)
        else:
            missing = [
                str({"type": "missing", "loc": f"body.{name}", "msg": "Field required"})
                for name in ("prompt", "messages")
            ]
            raise invalid(missing, "body.prompt")
        texts = [token_text(token) for token in tokens] if body.return_token_strs else None
        found = {"count": len(tokens), "max_model_len": options.max_model_len}
        await exchange.answer(
            HTTPStatus.OK, to_json({**found, "tokens": tokens, "token_strs": texts})
        )

    async def _detokenize(self, exchange: Exchange) -> None:
        body = parse_body(DetokenizeBody, await exchange.body(), exchange.media_type)
        exchange.check_model(body.model)
        await exchange.answer(HTTPStatus.OK, to_json({"prompt": decode(body.tokens)}))


def with_middleware(app: App, paths: tuple[str, ...]) -> App:
    """Return the application inside its middleware, the last one outermost, as vLLM loads it.

    Raises:
        ImportError, AttributeError: if a path names nothing.
        TypeError: if it names no class.
    """
    for path in paths:
        middleware = imported(path)
        if not isinstance(middleware, type):
            raise TypeError(f"Invalid middleware {path}. A simulated engine takes classes only.")
        app = middleware(app)
    return app
