"""The base class of all sections of the resource, and the types of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
)
from pydantic.alias_generators import to_camel

from fleetkeeper.api.values.form import Form
from fleetkeeper.api.values.quantity import BadQuantity, parse_quantity

DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
LABEL_KEY = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"

LABEL_KEY_SENTENCE = (
    "invalid label or annotation name; use NAME or DOMAIN/NAME, such as team or example.com/team"
)

ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Form(
        DNS_SUBDOMAIN,
        "is not the name of a Kubernetes object; use lowercase letters, digits, and inner hyphens and dots, such as models-1",
    ),
]
LabelKey = Annotated[
    str,
    Field(min_length=1, max_length=317),
    Form(LABEL_KEY, LABEL_KEY_SENTENCE, as_pattern=True),
]
LabelValue = Annotated[
    str,
    Field(max_length=63),
    Form(
        LABEL_VALUE,
        "is not the value of a label; use letters, digits, and inner -_., such as team-a",
        as_pattern=True,
    ),
]

V = TypeVar("V")


def _frozen(value: Mapping[str, V]) -> Mapping[str, V]:
    return MappingProxyType(dict(sorted(value.items())))


StringMap = Annotated[Mapping[str, V], AfterValidator(_frozen), PlainSerializer(dict)]
"""A read-only map, sorted by key."""


def frozen_map() -> Mapping[str, Any]:
    """Return an empty read-only map, for use as a default."""
    return MappingProxyType({})


class QuantityMark:
    """A marker for quantities: integers or strings. The CRD checks them with a CEL rule."""


class FreeForm:
    """A marker for maps whose schema is that of Kubernetes."""


def _as_text(value: object) -> object:
    """Return an integer as text: Kubernetes takes `cpu: 6` wherever it takes `cpu: "6"`.

    Raises:
        ValueError: The value is neither an integer nor a string.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        raise ValueError(f'must be an integer or a string; write "{value}" in quotes')  # noqa: TRY004
    raise ValueError("must be an integer or a string, such as 4, 500m, or 32Gi")


def _is_quantity(value: str) -> str:
    try:
        parse_quantity(value)
    except BadQuantity as problem:
        raise ValueError(str(problem)) from problem
    return value


Quantity = Annotated[
    str,
    Field(max_length=32),
    BeforeValidator(_as_text),
    AfterValidator(_is_quantity),
    QuantityMark(),
]
"""A Kubernetes quantity as text. `canonical_quantity` returns the API server's form."""


class Section(BaseModel):
    """A frozen part of the resource with snake_case attributes, camelCase keys, and no unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        serialize_by_alias=True,
        use_attribute_docstrings=False,
        hide_input_in_errors=True,
    )

    def to_manifest(self) -> dict[str, Any]:
        """Return the section as in a manifest: with camelCase keys and without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
