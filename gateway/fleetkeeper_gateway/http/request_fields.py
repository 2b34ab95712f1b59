"""Fields of a JSON body that the gateway reads: the model, and the work for an engine. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from fleetkeeper_contract.bodies.asked import Asked, asked_of
from fleetkeeper_contract.bodies.reader import JsonBody, read_body
from fleetkeeper_contract.bodies.refused import RefusedBodyError
from fleetkeeper_gateway.http.errors import Refusal, stateful

MAX_MODEL: Final = 256
"""Maximum characters of a model's name."""


class RequestFields(NamedTuple):
    """The fields of a valid body."""

    model: str
    asked: Asked


def parse_fields(data: bytes, body: JsonBody | None, path: str) -> RequestFields:
    """Parse the fields of a body.

    Args:
        data: the whole body.
        body: the parsed body if it was parsed in turns; None otherwise.
        path: decides which fields have a meaning.

    Raises:
        Refusal: if the body is not a JSON object, exceeds a bound, names no model, names a field
            twice, or refers to a stored response.
    """
    if body is None:
        try:
            body = read_body(data)
        except RefusedBodyError as error:
            raise refusal_of(error) from None
    model = body.text(body.fields.get("model"), MAX_MODEL)
    if not model:
        raise Refusal(
            400,
            "missing_model",
            f"The body must name a model: a text of at most {MAX_MODEL} characters in model.",
            param="model",
        )
    if body.fields.get("previous_response_id") is not None:
        raise stateful("previous_response_id")
    return RequestFields(model, asked_of(body, path, len(data)))


def refusal_of(error: RefusedBodyError) -> Refusal:
    """Return the answer to a body that is refused."""
    return Refusal(error.status, error.code, str(error), param=error.param)
