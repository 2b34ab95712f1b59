"""A rule between fields in both languages, and the rules that several sections share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from fleetkeeper.api.base import LABEL_KEY, LABEL_KEY_SENTENCE
from fleetkeeper.api.profiles.metadata_names import HARMLESS, KUBERNETES, is_for_kubernetes
from fleetkeeper.api.values.quantity import parse_quantity

S = TypeVar("S")


@dataclass(frozen=True)
class Rule(Generic[S]):
    """A rule of a section. `field` is the key that the message refers to ("" for the section itself).

    `cel` is empty if the schema already enforces the rule (keys of list maps).
    """

    field: str
    cel: str
    holds: Callable[[S], bool]
    message: str

    @property
    def reads(self) -> frozenset[str]:
        """Return the paths of the fields that the rule depends on, relative to the section."""
        keys = re.findall(r"'([a-z-]+)' in self((?:\.[A-Za-z]+)+)", self.cel)
        maps = {path[1:] for _, path in keys}
        paths = {path[1:] for path in re.findall(r"self((?:\.[A-Za-z]+)+)", self.cel)} - maps
        return frozenset({*paths, *(f"{path[1:]}.{key}" for key, path in keys)} - {""})


class Schemes:
    """Schemes of sources, for rules that must not apply to a source in an unknown notation.

    Such a source is refused by itself. It must not be the reason to remove other fields, too.
    """

    def __init__(self, *names: str) -> None:
        self._prefixes = tuple(f"{name}://" for name in names)
        self.cel = f"self.source.matches('^({'|'.join(names)})://')"

    def has(self, source: str) -> bool:
        """Return True if the source has one of the schemes."""
        return source.startswith(self._prefixes)


KEY_LENGTH = 317
_KEY = re.compile(LABEL_KEY)


def keys_match(pattern: re.Pattern[str], keys: Mapping[str, str], longest: int) -> bool:
    """Return True if all keys match the pattern and are at most `longest` characters long."""
    return all(len(key) <= longest and pattern.search(key) is not None for key in keys)


def cel_keys(field: str, pattern: str, longest: int) -> str:
    """Return the CEL of `keys_match` for the map `field`."""
    return f"self.{field}.all(k, size(k) <= {longest} && k.matches(r'{pattern}'))"


def label_keys_rule(field: str, attribute: str) -> Rule[Any]:
    """Return a rule that all keys of `field` are names of labels or annotations."""
    return Rule(
        field,
        cel_keys(field, LABEL_KEY, KEY_LENGTH),
        lambda of: keys_match(_KEY, getattr(of, attribute), KEY_LENGTH),
        LABEL_KEY_SENTENCE,
    )


def unreserved_keys_rule(field: str) -> Rule[Any]:
    """Return a rule that no key of `field` is reserved for Fleetkeeper or Helm."""
    return Rule(
        field,
        f"self.{field}.all(k, !k.startsWith('fleetkeeper.io/') && k != 'app.kubernetes.io/managed-by')",
        lambda of: (
            not any(
                key.startswith("fleetkeeper.io/") or key == "app.kubernetes.io/managed-by"
                for key in getattr(of, field)
            )
        ),
        "the prefix fleetkeeper.io/ and the name app.kubernetes.io/managed-by are reserved; choose another name",
    )


def kubernetes_keys_rule(field: str) -> Rule[Any]:
    """Return a rule that no key of `field` is an instruction to Kubernetes."""
    known = " || ".join(
        f"k.startsWith('{name[:-1]}')" if name.endswith("*") else f"k == '{name}'"
        for name in HARMLESS
    )
    return Rule(
        field,
        f"self.{field}.all(k, !k.matches('{KUBERNETES}') || {known})",
        lambda of: not any(is_for_kubernetes(key) for key in getattr(of, field)),
        "names of Kubernetes are instructions to it, except app.kubernetes.io/; remove them, or let an administrator set them in the podTemplate of an engine profile",
    )


def unique_items_rule(
    field: str, attribute: str, key: Callable[[Any], object], message: str
) -> Rule[Any]:
    """Return a rule that no two items of `field` have the same key. The API server knows the keys."""

    def holds(of: BaseModel) -> bool:
        items = getattr(of, attribute)
        return len({key(item) for item in items}) == len(items)

    return Rule(field, "", holds, message)


def quantity_rule(field: str, attribute: str, most: str) -> Rule[Any]:
    """Return a rule that `field` is absent or a quantity greater than 0 and at most `most`."""

    def holds(of: BaseModel) -> bool:
        text: str | None = getattr(of, attribute)
        return text is None or 0 < parse_quantity(text) <= parse_quantity(most)

    return Rule(
        field,
        f"!has(self.{field}) || ({cel_is_quantity(field)} && "
        f"{cel_quantity(field)}.isGreaterThan(quantity('0')) && "
        f"!{cel_quantity(field)}.isGreaterThan(quantity('{most}')))",
        holds,
        f"must be a quantity greater than 0 and at most {most}, such as 32Gi, 500m, or 4",
    )


def cel_quantity(field: str) -> str:
    """Return CEL of the field's value as a quantity. An integer is a quantity, as in a pod."""
    return f"quantity(string(self.{field}))"


def cel_is_quantity(field: str) -> str:
    """Return CEL that checks that the field is a quantity with an exponent of at most two digits.

    Go parses any exponent. The rule rejects longer ones before the API server computes with them, as
    `parse_quantity` does.
    """
    return (
        f"!string(self.{field}).matches('[eE][+-]?[0-9]{{3}}') && isQuantity(string(self.{field}))"
    )
