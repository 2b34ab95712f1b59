"""Errors in the format of vLLM's."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

MAX_REPORTED = 10


class RefusedRequestError(Exception):
    """A request that vLLM refuses. `kind`: the error's type."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        value: object = None,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        kind: str = "BadRequestError",
    ) -> None:
        details = {"parameter": param, "value": value}
        known = ", ".join(f"{name}={found}" for name, found in details.items() if found is not None)
        super().__init__(f"{message} ({known})" if known and kind == "BadRequestError" else message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """Return the answer's body."""
        return error_body(str(self), self.kind, self.status, self.param)


def error_body(message: str, kind: str, status: HTTPStatus, param: str | None = None) -> bytes:
    """Return an error as vLLM answers it."""
    error = {"message": message, "type": kind, "param": param, "code": status.value}
    return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode()


def unknown_model(name: str | None, served: str) -> RefusedRequestError:
    """Return the refusal of a model that is not served."""
    return RefusedRequestError(
        f"The model `{name}` does not exist. Valid aliases: {served}.",
        param="model",
        status=HTTPStatus.NOT_FOUND,
        kind="NotFoundError",
    )


def invalid(errors: list[str], param: str | None) -> RefusedRequestError:
    """Return the refusal of a body that is not what the route takes."""
    count = len(errors)
    label = "error" if count == 1 else "errors"
    lines = [f"{count} validation {label}:", *(f"  {error}" for error in errors[:MAX_REPORTED])]
    refusal = RefusedRequestError("\n".join(lines), kind="Bad Request")
    refusal.param = param
    return refusal


def invalid_fields(problem: ValidationError) -> RefusedRequestError:
    """Return the refusal of a body with wrong fields. `param` is the first one's path."""
    errors = [_place(dict(error)) for error in problem.errors(include_url=False)]
    return invalid([str(error) for error in errors], errors[0]["loc"])


def _place(error: dict[str, Any]) -> dict[str, Any]:
    parts = ["body", *(str(part) for part in error["loc"] if _is_field(part))]
    found = {**error, "loc": ".".join(parts)}
    found["input"] = _summary(error.get("input"))
    return found


def _is_field(part: object) -> bool:
    """Return whether a part of a path is a field or a place in a list, and no kind of a union."""
    return isinstance(part, int) or not (
        {*"[]()"} & {*str(part)} or part in ("str", "int", "list", "dict")
    )


def _summary(value: object) -> str:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)[:200]
