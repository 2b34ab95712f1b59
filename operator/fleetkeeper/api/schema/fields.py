"""Introspection of the models: the class of a field behind Optional, tuples, and annotations."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from functools import cache

from pydantic import BaseModel


def bare(annotation: object) -> object:
    """Return the annotation without Optional and Annotated. `int | str` stays: one marker covers both."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin in (typing.Union, types.UnionType):
            rest = [arg for arg in typing.get_args(annotation) if arg is not types.NoneType]
            if rest == [int, str]:
                return annotation
            if len(rest) != 1:
                raise TypeError(f"{annotation} has no single meaning in a schema")
            annotation = rest[0]
        else:
            return annotation


def item_of(annotation: object) -> object:
    """Return the type of a tuple's items or a map's values, or the annotation itself if it is neither."""
    inner = bare(annotation)
    arguments: tuple[object, ...] = typing.get_args(inner)
    if not arguments:
        return inner
    return arguments[0] if typing.get_origin(inner) is tuple else arguments[1]


@cache
def aliases(model: type[BaseModel]) -> tuple[tuple[str, str, object], ...]:
    """Return (key in the manifest, attribute, annotation) for each field."""
    return tuple(
        (info.alias or name, name, info.annotation) for name, info in model.model_fields.items()
    )


@cache
def sections(model: type[BaseModel]) -> Mapping[str, type[BaseModel] | None]:
    """Return the section class of each field by its key in the manifest, None for other fields."""
    found: dict[str, type[BaseModel] | None] = {}
    for key, _, annotation in aliases(model):
        inner = bare(annotation)
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        found[key] = typing.cast("type[BaseModel]", inner) if is_section else None
    return types.MappingProxyType(found)


def known_fields(model: type[BaseModel], where: tuple[int | str, ...]) -> list[str]:
    """Return the keys that a manifest may have at this path below the model."""
    for part in where:
        if isinstance(part, int):
            continue
        annotation = next((of for key, _, of in aliases(model) if key == part), None)
        inner = bare(item_of(annotation)) if annotation is not None else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return sorted(key for key, _, _ in aliases(model))
