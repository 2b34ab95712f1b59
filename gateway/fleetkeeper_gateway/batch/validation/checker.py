"""Checks of one line after the other. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, NamedTuple

from fleetkeeper_contract.json_outline import SMALL_BYTES, Outline, RefusedBodyError
from fleetkeeper_gateway.http.request_fields import asked_tokens

MAX_ID: Final = 512
"""Characters of a custom_id."""
MAX_MODEL: Final = 256
_SHOWN = 100
_WRAPPER: Final = len('{"custom_id":"","method":"POST","url":"","body":}')
"""Bytes of a line around its ID, its address and its body."""


class BadLine(Exception):
    """A mistake of a line. The message is for the client."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Asked(NamedTuple):
    """What a line asks of an engine."""

    body_bytes: int
    """About: the body is not written again to count its bytes."""
    max_tokens: int | None
    """Tokens of an answer. None: the engine decides."""
    choices: int


class LineChecker:
    """Checks the lines of one file. What must be the same in all of them, the first valid one decides."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lines: dict[bytes, int] = {}
        """Lines by the digest of their ID. The IDs themselves could be 100 MB."""
        self.model = ""

    def check(self, number: int, text: bytes) -> Asked:
        """Return what a line asks for.

        Args:
            number: of the line, from 1.
            text: without the end of the line.

        Raises:
            BadLine: with its first mistake.
        """
        fields = _parse(text)
        custom_id = self._check_id(number, fields)
        if _required(fields, "method") != "POST":
            raise BadLine("invalid_method", "The method must be POST.", "method")
        if _required(fields, "url") != self._endpoint:
            raise BadLine(
                "invalid_url",
                f"The url must be the endpoint of the batch, {self._endpoint}.",
                "url",
            )
        body = _required(fields, "body")
        if not isinstance(body, dict):
            raise BadLine("invalid_body", "The body must be a JSON object.", "body")
        self._check_model(body)
        stream = body.get("stream")
        if stream is not None and stream is not False:
            raise BadLine(
                "stream_not_supported", "A line has one answer: leave stream out.", "body.stream"
            )
        around = _WRAPPER + len(custom_id) + len(self._endpoint)
        return Asked(max(2, len(text) - around), *asked_tokens(body, self._endpoint))

    def _check_id(self, number: int, fields: dict[str, Any]) -> str:
        custom_id = _required(fields, "custom_id")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID:
            raise BadLine(
                "invalid_custom_id",
                f"The custom_id must be a text of 1 to {MAX_ID} characters.",
                "custom_id",
            )
        digest = hashlib.blake2b(_encoded(custom_id, "custom_id"), digest_size=16).digest()
        first = self._lines.setdefault(digest, number)
        if first != number:
            raise BadLine(
                "duplicate_custom_id", f"Line {first} has the same custom_id.", "custom_id"
            )
        return custom_id

    def _check_model(self, body: dict[str, Any]) -> None:
        model = body.get("model")
        if not isinstance(model, str) or not 1 <= len(model) <= MAX_MODEL:
            raise BadLine(
                "invalid_model",
                f"The body must name a model: a text of at most {MAX_MODEL} characters.",
                "body.model",
            )
        _encoded(model, "body.model")
        if not self.model:
            self.model = model
        elif model != self.model:
            raise BadLine(
                "mismatched_model",
                f"All lines must name the same model. An earlier one names {self.model[:_SHOWN]!r}.",
                "body.model",
            )


class _NotJson(ValueError):
    """A text that Python's decoder reads and JSON does not have. The message is for the client."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise BadLine(
            "duplicate_key", "A name is there twice in one object, so two readers could disagree."
        )
    return fields


def _constant(name: str) -> object:
    raise _NotJson(f"JSON has no {name}")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise BadLine(
            "invalid_utf8", f"The line is not UTF-8 from its byte {error.start}."
        ) from None
    if len(text) > SMALL_BYTES:
        _check_values(text)
    try:
        fields = _DECODER.decode(decoded)
    except RecursionError:
        raise BadLine("too_deep", "The line is nested too deeply.") from None
    except (json.JSONDecodeError, _NotJson) as error:
        raise BadLine("invalid_json_line", f"The line is not JSON: {error}.") from None
    except ValueError:
        # Python bounds the digits of the numbers that it reads.
        raise BadLine("invalid_json_line", "A number has too many digits.") from None
    if not isinstance(fields, dict):
        raise BadLine("invalid_json_line", "The line must be a JSON object.")
    return fields


def _check_values(text: bytes) -> None:
    """Refuse a line with so many values that they would take many times its size in memory.

    The gateway and the engines refuse such a body in the same way.
    """
    outline = Outline()
    try:
        for start in range(0, len(text), SMALL_BYTES):
            outline.feed(text[start : start + SMALL_BYTES])
    except RefusedBodyError as error:
        raise BadLine(error.code, str(error)) from None


def _required(fields: dict[str, Any], name: str) -> object:
    if name not in fields:
        raise BadLine("missing_required_parameter", f"The line has no {name}.", name)
    return fields[name]


def _encoded(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadLine(
            f"invalid_{param.removeprefix('body.')}",
            f"The {param} has half of a surrogate pair, which is no text.",
            param,
        ) from None
