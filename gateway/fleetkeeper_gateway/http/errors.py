"""Refusals in the format of the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from fleetkeeper_gateway.http.asgi import Headers
from fleetkeeper_gateway.interfaces import HoldRefused, KeyRefused, LimitRefused, Service

INVALID = "invalid_request_error"
SERVER = "server_error"
LIMIT_REACHED = "rate_limit_exceeded"
_SHOWN = 200
"""Maximum characters of a client's value that an error repeats."""


class Refusal(Exception):
    """A refusal by the gateway. The message is for the client; it is never logged."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.param = param
        self.headers: Headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in (headers or {}).items()
        ]
        self.details = details or {}

    def body(self) -> bytes:
        """Return the error in the format of OpenAI's API."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.code,
            **self.details,
        }
        return json.dumps({"error": error}).encode()


def key_refused(error: KeyRefused) -> Refusal:
    """Return the refusal of a key."""
    if error.code == "keys_unavailable":
        return unavailable(error.code, str(error), 5)
    return Refusal(401, error.code, str(error), headers={"www-authenticate": "Bearer"})


def limit_refused(error: LimitRefused) -> Refusal:
    """Return the refusal of a request whose limit is reached."""
    return Refusal(
        429,
        LIMIT_REACHED,
        str(error),
        kind="rate_limit_error",
        headers={**error.headers, "retry-after": str(error.retry_after_s)},
        details={"limit": error.limit},
    )


def hold_refused(error: HoldRefused, model: str) -> Refusal:
    """Return the refusal of a request that is not held for its service, or not anymore."""
    if error.code == "model_not_found":
        return unknown_model(model)
    return unavailable(error.code, str(error), error.retry_after_s)


def unknown_model(model: str) -> Refusal:
    """Return the refusal of a model that does not exist, or that the key may not use.

    Both get the same refusal, so that a client does not learn which models others have.
    """
    return Refusal(
        404,
        "model_not_found",
        f"The model {model[:_SHOWN]!r} does not exist, or your key may not use it. "
        "GET /v1/models lists the models that it may use.",
        param="model",
    )


def ambiguous_model(model: str, services: Iterable[Service]) -> Refusal:
    """Return the refusal of a model that several services serve."""
    names = ", ".join(sorted(service.path for service in services))
    return Refusal(
        400,
        "ambiguous_model",
        f"The model {model[:_SHOWN]!r} is served by {names}. "
        "Name one of them in the header X-Fleetkeeper-Service.",
        param="model",
    )


def unknown_path(path: str) -> Refusal:
    """Return the refusal of a path that is not served."""
    return Refusal(404, "unknown_path", f"Path {path[:_SHOWN]!r} is not served.")


def wrong_method(method: str, allowed: str) -> Refusal:
    """Return the refusal of a method that a path does not have."""
    return Refusal(
        405,
        "method_not_allowed",
        f"This path takes {allowed}, not {method[:16]}.",
        headers={"allow": allowed},
    )


def stateful(param: str | None) -> Refusal:
    """Return the refusal of a request that refers to a stored response."""
    return Refusal(
        400,
        "stateful_responses_not_supported",
        "Stored responses are in the memory of one engine and cannot be referred to here. "
        "Send the whole conversation in input.",
        param=param,
    )


def unavailable(
    code: str, message: str, retry_after_s: int, details: Mapping[str, object] | None = None
) -> Refusal:
    """Return the refusal of a request that was not sent and may be sent again."""
    headers = {"retry-after": str(retry_after_s)}
    return Refusal(503, code, message, kind=SERVER, headers=headers, details=details)
