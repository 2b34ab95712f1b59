"""Checks the lines of a file, one after another. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from fleetkeeper_contract.bodies.asked import Asked, asked_of
from fleetkeeper_contract.bodies.reader import JsonBody, read_body
from fleetkeeper_contract.bodies.refused import RefusedBodyError
from fleetkeeper_gateway.http.request_fields import MAX_MODEL

MAX_ID: Final = 512
"""Maximum characters of a custom_id."""
_CODES: Final = {
    "invalid_json": "invalid_json_line",
    "encoding_not_supported": "invalid_json_line",
    "duplicate_field": "duplicate_key",
}
"""Error codes of a line, by the error code of its body."""
_SHOWN = 100
_WRAPPER: Final = len('{"custom_id":"","method":"POST","url":"","body":}')
"""Bytes of a line beside its ID, its URL and its body."""


class BadLine(Exception):
    """A line is not valid. The message is for the client."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class LineChecker:
    """Checks the lines of one file. The first valid line sets the values that all lines must share."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lines: dict[bytes, int] = {}
        """Line numbers by the digest of the custom_id. The IDs themselves could take 100 MB."""
        self.model = ""

    def check(self, number: int, text: bytes) -> Asked:
        """Check a line, and return its model and estimate fields.

        Args:
            number: line number, from 1.
            text: the line, without its end.

        Raises:
            BadLine: with the first mistake.
        """
        line = _read(text)
        fields = line.fields
        custom_id = self._check_id(number, line)
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
        self._check_model(line, body)
        stream = body.get("stream")
        if stream is not None and stream is not False:
            raise BadLine(
                "stream_not_supported", "A line has one answer: leave stream out.", "body.stream"
            )
        around = _WRAPPER + len(custom_id) + len(self._endpoint)
        size = max(2, len(text) - around)
        return asked_of(JsonBody(body, text), self._endpoint, size)

    def _check_id(self, number: int, line: JsonBody) -> str:
        custom_id = line.text(_required(line.fields, "custom_id"), MAX_ID)
        if not custom_id:
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

    def _check_model(self, line: JsonBody, body: dict[str, Any]) -> None:
        model = line.text(body.get("model"), MAX_MODEL)
        if not model:
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


def _read(text: bytes) -> JsonBody:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise BadLine(
            "invalid_utf8", f"The line is not UTF-8 from its byte {error.start}."
        ) from None
    try:
        return read_body(text, within="body")
    except RefusedBodyError as error:
        message = str(error).replace("body", "line", 1)
        raise BadLine(_CODES.get(error.code, error.code), message) from None


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
