"""What the gateway reads from a JSON body: the model, and the tokens that it asks for. Pure."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from fleetkeeper_contract.json_outline import MANY, Outline
from fleetkeeper_gateway.http.errors import Refusal, stateful
from fleetkeeper_gateway.http.paths import GENERATES

_MAX_COUNTED = 10**6


class RequestFields(NamedTuple):
    """The properties of a readable body."""

    model: str
    max_tokens: int | None
    """Tokens of the answer that the client allows. None: the engine decides."""
    choices: int


class _Duplicated(dict[str, Any]):
    """An object with a name that occurs twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    # In an outline, long names are empty. None of them has a meaning here.
    names = [name for name, _ in pairs if name]
    return fields if len(names) == len(set(names)) else _Duplicated(pairs)


def _constant(name: str) -> object:
    return MANY if name == "Infinity" else float(name)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def parse_fields(body: bytes, outline: Outline | None, path: str) -> RequestFields:
    """Return what a body asks for.

    Args:
        body: the whole body.
        outline: the outline of a large one.
        path: decides which fields have a meaning.

    Raises:
        Refusal: if the body is not a JSON object, names no model, names a field twice, or refers to
            a stored response.
    """
    fields = _parsed(body, outline)
    if type(fields) is _Duplicated:
        raise Refusal(
            400,
            "duplicate_field",
            "A field of the body is there twice, so two readers could disagree. Send it once.",
        )
    if not isinstance(fields, dict):
        raise Refusal(400, "invalid_json", "The body must be a JSON object.")
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise Refusal(
            400, "missing_model", "The body must name a model: a text in model.", param="model"
        )
    if fields.get("previous_response_id") is not None:
        raise stateful("previous_response_id")
    return RequestFields(model, *asked_tokens(fields, path))


def asked_tokens(fields: dict[str, Any], path: str) -> tuple[int | None, int]:
    """Return the tokens of an answer that a body allows, and the number of answers.

    None: the engine decides.
    """
    if path not in GENERATES:
        return 0, 1
    return _max_tokens(fields), _count(fields.get("n"), 1)


def _parsed(body: bytes, outline: Outline | None) -> object:
    try:
        if outline is not None:
            return outline.fields(_DECODER)
        return _DECODER.decode(body.decode())
    except RecursionError:
        raise Refusal(400, "too_deep", "The body is nested too deeply.") from None
    except ValueError as error:
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        # The error's own text may contain the body's.
        raise Refusal(400, "invalid_json", f"The body is not JSON in UTF-8{place}.") from None


def _max_tokens(fields: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if fields.get(name) is not None:
            return _count(fields[name], _MAX_COUNTED)
    return None


def _count(value: object, default: int) -> int:
    """Return a number of the client within bounds. The engine refuses what is no number."""
    if type(value) is not int:
        return default
    return min(max(value, 0), _MAX_COUNTED)
