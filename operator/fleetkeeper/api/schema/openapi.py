"""Conversion of the models into a structural schema for Kubernetes.

Pydantic's JSON schema is not usable: it contains $ref and null, which a CRD must not contain. Every
object whose fields all have defaults gets a default, so that nested defaults apply. Every string,
list, and number has bounds. Every list has a list type.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fleetkeeper.api.base import FreeForm, QuantityMark, Section
from fleetkeeper.api.schema.fields import bare, item_of
from fleetkeeper.api.schema.rule import Rule
from fleetkeeper.api.schema.rules import RULES
from fleetkeeper.api.status import TimeMark
from fleetkeeper.api.values.form import Form
from fleetkeeper.api.values.int_or_percent import PERCENT, PERCENT_MAX_LENGTH, IntOrPercent

Schema = dict[str, Any]

LIST_MAP_KEYS = {
    "Adapter": ("name",),
    "Condition": ("type",),
    "DeviceClaim": ("name",),
    "EnvironmentVariable": ("name",),
    "ReplicaState": ("name",),
    "TopologySpreadConstraint": ("topologyKey", "whenUnsatisfiable"),
}
"""The key fields of lists of type map. All other lists are atomic."""

_BOUNDS = {
    "ge": "minimum",
    "le": "maximum",
    "gt": "exclusiveMinimum",
    "lt": "exclusiveMaximum",
}


_STRING: Schema = {"type": "string"}
# A rule of the section checks the value and has a better message. The bounds apply to strings.
_QUANTITY: Schema = {"x-kubernetes-int-or-string": True}


def object_schema(model: type[BaseModel]) -> Schema:
    """Return the schema of a section: its fields, the required ones, and the rules between them."""
    properties, required = {}, []
    for name, info in model.model_fields.items():
        key = info.alias or name
        properties[key] = _field_schema(f"{model.__name__}.{name}", info)
        if info.is_required():
            required.append(key)
    schema: Schema = {"type": "object", "properties": dict(sorted(properties.items()))}
    if required:
        schema["required"] = sorted(required)
    rules = [rule_schema(rule) for rule in RULES.get(model, ()) if rule.cel]
    if rules:
        schema["x-kubernetes-validations"] = rules
    return schema


def rule_schema(rule: Rule[Any]) -> Schema:
    """Return the rule as an entry of x-kubernetes-validations."""
    validation: Schema = {"rule": rule.cel, "message": rule.message}
    return {**validation, "fieldPath": f".{rule.field}"} if rule.field else validation


def _field_schema(where: str, info: FieldInfo) -> Schema:
    if not info.description:
        raise TypeError(f"{where} has no description")
    schema = _type_schema(where, info.annotation, info.metadata)
    default = _default(info)
    if default is not None:
        schema["default"] = default
    schema["description"] = _description(info.description, schema)
    return _ordered(schema)


def _default(info: FieldInfo) -> Any:  # noqa: ANN401 - any JSON value
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return None
    if isinstance(value, BaseModel):
        # The API server checks the rules on this default before it applies nested defaults.
        has_rules = any(rule.cel for rule in RULES.get(type(value), ()))
        return value.to_manifest() if has_rules and isinstance(value, Section) else {}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [item.to_manifest() if isinstance(item, Section) else item for item in value]
    return value


def _description(text: str, schema: Schema) -> str:
    """Append the bounds and the default, because `kubectl explain` does not show them otherwise."""
    parts = [text]
    least, most = schema.get("minimum"), schema.get("maximum")
    if most is not None:
        parts.append(f"From {least} to {most}.")
    default = schema.get("default")
    if default is not None and not isinstance(default, (dict, list)):
        shown = str(default).lower() if isinstance(default, bool) else default
        parts.append(f"Default: {shown}.")
    return " ".join(parts)


def _type_schema(where: str, annotation: object, metadata: typing.Sequence[object]) -> Schema:
    inner, marks = _unwrapped(annotation, list(metadata))
    for mark in marks:
        if isinstance(mark, IntOrPercent):
            return _int_or_percent_schema(mark)
        if isinstance(mark, FreeForm):
            return {"type": "object"}
    origin = typing.get_origin(inner)
    if origin is tuple:
        return _list_schema(where, inner, marks)
    if origin is not None:
        return _map_schema(where, inner, marks)
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return object_schema(inner)
    return _scalar_schema(where, inner, marks)


def _int_or_percent_schema(mark: IntOrPercent) -> Schema:
    """Return the schema of both forms. Each bound applies to the form that can have it."""
    return {
        "x-kubernetes-int-or-string": True,
        "minimum": 0,
        "maximum": mark.most,
        "maxLength": PERCENT_MAX_LENGTH,
        "x-kubernetes-validations": [
            {
                "rule": f"type(self) == int || string(self).matches(r'{PERCENT}')",
                "message": mark.sentence,
            }
        ],
    }


def _scalar_schema(where: str, inner: object, marks: list[object]) -> Schema:
    if isinstance(inner, type) and issubclass(inner, Enum):
        return {"type": "string", "enum": [member.value for member in inner]}
    if inner is bool:
        return {"type": "boolean"}
    if inner is int:
        return {"type": "integer", "format": "int64", **_number_bounds(where, marks)}
    if inner is float:
        return {"type": "number", **_number_bounds(where, marks)}
    if inner is str:
        kind = _QUANTITY if any(isinstance(mark, QuantityMark) for mark in marks) else _STRING
        return {**kind, **_string_bounds(where, marks)}
    raise TypeError(f"{where}: no schema for {inner!r}")


def _unwrapped(annotation: object, marks: list[object]) -> tuple[object, list[object]]:
    """Return the bare type and all constraints of its annotations."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation, *more = typing.get_args(annotation)
            for mark in more:
                marks += mark.metadata if isinstance(mark, FieldInfo) else [mark]
            continue
        inside = bare_optional(annotation)
        if inside is annotation:
            return annotation, marks
        annotation = inside


def bare_optional(annotation: object) -> object:
    """Return the annotation without `| None`, but with its other annotations."""
    arguments = typing.get_args(annotation)
    if type(None) not in arguments:
        return annotation
    rest = [argument for argument in arguments if argument is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"{annotation} has no single meaning in a schema")
    return rest[0]


def _list_schema(where: str, annotation: object, marks: list[object]) -> Schema:
    schema: Schema = {
        "type": "array",
        "items": _ordered(_type_schema(where, item_raw(annotation), [])),
    }
    for mark in marks:
        if isinstance(mark, annotated_types.MaxLen):
            schema["maxItems"] = mark.max_length
        if isinstance(mark, annotated_types.MinLen):
            schema["minItems"] = mark.min_length
    if "maxItems" not in schema:
        raise TypeError(f"{where}: a list requires a maximum length")
    item = bare(item_of(annotation))
    keys = LIST_MAP_KEYS.get(item.__name__) if isinstance(item, type) else None
    schema["x-kubernetes-list-type"] = "map" if keys else "atomic"
    if keys:
        schema["x-kubernetes-list-map-keys"] = list(keys)
    return schema


def _map_schema(where: str, annotation: object, marks: list[object]) -> Schema:
    schema: Schema = {
        "type": "object",
        "additionalProperties": _ordered(_type_schema(where, typing.get_args(annotation)[1], [])),
    }
    for mark in marks:
        if isinstance(mark, annotated_types.MaxLen):
            schema["maxProperties"] = mark.max_length
    if "maxProperties" not in schema:
        raise TypeError(f"{where}: a map requires a maximum number of entries")
    return schema


def item_raw(annotation: object) -> object:
    """Return the type of a tuple's items with its constraints."""
    return typing.get_args(annotation)[0]


def _number_bounds(where: str, marks: list[object]) -> Schema:
    bounds = {
        keyword: getattr(mark, name)
        for mark in marks
        for name, keyword in _BOUNDS.items()
        if hasattr(mark, name)
    }
    if "minimum" not in bounds:
        raise TypeError(f"{where}: a number requires a minimum")
    return bounds


def _string_bounds(where: str, marks: list[object]) -> Schema:
    schema: Schema = {}
    for mark in marks:
        if isinstance(mark, annotated_types.MaxLen):
            schema["maxLength"] = mark.max_length
        elif isinstance(mark, annotated_types.MinLen):
            schema["minLength"] = mark.min_length
        elif isinstance(mark, TimeMark):
            schema["format"] = "date-time"
        elif isinstance(mark, Form):
            schema |= {"pattern": mark.pattern} if mark.as_pattern else _form_rule(mark)
        elif getattr(mark, "pattern", None):
            schema["pattern"] = mark.pattern  # type: ignore[attr-defined]
    if "maxLength" not in schema:
        raise TypeError(f"{where}: a string requires a maximum length")
    return schema


def _form_rule(form: Form) -> Schema:
    """Return the form as a CEL rule. Its first mistake that matches has the message."""
    rule: Schema = {"rule": f"self.matches(r'{form.pattern}')", "message": form.sentence}
    if form.mistakes:
        chosen = "".join(
            f"self.matches(r'{pattern}') ? {json.dumps(sentence)} : "
            for pattern, sentence in form.mistakes
        )
        rule["messageExpression"] = chosen + json.dumps(form.sentence)
    return {"x-kubernetes-validations": [rule]}


_ORDER = ("description", "type", "format", "default", "enum")


def _ordered(schema: Schema) -> Schema:
    head = {key: schema[key] for key in _ORDER if key in schema}
    return {**head, **{key: value for key, value in schema.items() if key not in head}}
