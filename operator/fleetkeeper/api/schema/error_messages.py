"""Conversion of pydantic errors into messages that name the field, the error, and the correction."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fleetkeeper.api.schema.fields import known_fields


@dataclass(frozen=True, slots=True)
class FieldError:
    """An error: the path of the field (`spec.scaling.minReplicas`) and a message with the correction.

    `reads` are the paths of the other fields that the error depends on.
    """

    path: str
    message: str
    reads: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        """Return the path and the message."""
        return f"{self.path}: {self.message}"


def path_text(*parts: str | int) -> str:
    """Join the parts of a path, for example to `spec.model.adapters[0].name`."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def in_plain_words(problem: ValidationError, root: str, model: type[BaseModel]) -> list[FieldError]:
    """Return each pydantic error as a field error. The paths start at the fields of `model`."""
    errors = []
    for finding in problem.errors(include_url=False, include_input=True):
        where = place_of(finding)
        errors.append(FieldError(path_text(root, *where), _sentence(finding, where, model)))
    return errors


def place_of(finding: ErrorDetails) -> tuple[int | str, ...]:
    """Return the path of a pydantic error in the manifest."""
    return tuple(part for part in finding["loc"] if part != "[key]")


def _sentence(finding: ErrorDetails, where: tuple[int | str, ...], model: type[BaseModel]) -> str:
    kind = finding["type"]
    if kind == "extra_forbidden":
        return _unknown_field(where, model)
    words = _SENTENCES.get(kind)
    if words is None:
        return finding["msg"].removeprefix("Value error, ")
    return words(finding.get("ctx", {}), finding["input"])


def _unknown_field(where: tuple[int | str, ...], model: type[BaseModel]) -> str:
    known = known_fields(model, where[:-1])
    near = difflib.get_close_matches(str(where[-1]), known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else f"; known fields: {', '.join(known)}"
    return f"unknown field{hint}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wrong_type(wanted: str) -> Callable[[Mapping[str, Any], object], str]:
    def sentence(_: Mapping[str, Any], value: object) -> str:
        if value is None:
            return f"must be {wanted}; omit the field instead of setting it to null"
        return f"must be {wanted}, but is {_shown(value)}"

    return sentence


def _type_of_text(_: Mapping[str, Any], value: object) -> str:
    if isinstance(value, (int, float)):
        return f'must be a string; write "{str(value).lower() if isinstance(value, bool) else value}" in quotes'
    return _wrong_type("a string")(_, value)


_SENTENCES: dict[str, Callable[[Mapping[str, Any], object], str]] = {
    "missing": lambda _, __: "is missing",
    "greater_than_equal": lambda ctx, value: (
        f"must be at least {ctx['ge']}, but is {_shown(value)}"
    ),
    "less_than_equal": lambda ctx, value: f"must be at most {ctx['le']}, but is {_shown(value)}",
    "int_type": _wrong_type("an integer"),
    "int_from_float": _wrong_type("an integer"),
    "int_parsing_size": _wrong_type("an integer with fewer digits"),
    "bool_type": _wrong_type("true or false"),
    "string_type": _type_of_text,
    "model_type": _wrong_type("an object"),
    "model_attributes_type": _wrong_type("an object"),
    "dict_type": _wrong_type("a map"),
    "mapping_type": _wrong_type("a map"),
    "tuple_type": _wrong_type("a list"),
    "list_type": _wrong_type("a list"),
    "enum": lambda ctx, value: f"must be one of {ctx['expected']}, but is {_shown(value)}",
    "string_too_short": lambda ctx, _: f"must have at least {ctx['min_length']} characters",
    "string_too_long": lambda ctx, _: f"must have at most {ctx['max_length']} characters",
    "string_pattern_mismatch": lambda ctx, value: (
        f"is {_shown(value)}, but must match {ctx['pattern']}"
    ),
    "too_long": lambda ctx, _: f"must have at most {ctx['max_length']} entries",
    "too_short": lambda ctx, _: f"must have at least {ctx['min_length']} entries",
}
