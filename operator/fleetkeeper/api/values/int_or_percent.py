"""Numbers of pods that are an integer or a percentage ("25%"), as in a Deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

PERCENT = r"^(0|[1-9][0-9]?|100)%$"
"""At most 100%, without leading zeros. A larger surge would be more than a second fleet."""
PERCENT_MAX_LENGTH = 4
_PERCENTAGES = frozenset(f"{number}%" for number in range(101))
ZERO = ("0", "0%")


@dataclass(frozen=True)
class IntOrPercent:
    """A marker of `int | str` fields: an integer from 0 to `most`, or a percentage."""

    most: int

    @property
    def sentence(self) -> str:
        """Return what a value must be."""
        return (
            f"must be an integer from 0 to {self.most} or a percentage from 0% to 100%, such as 25%"
        )

    def accepted(self, value: object) -> int | str:
        """Return the value if it is valid.

        Raises:
            ValueError: The value is neither such an integer nor a percentage.
        """
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and 0 <= value <= self.most:  # type: ignore[operator]
            return value  # type: ignore[return-value]
        if isinstance(value, str) and value in _PERCENTAGES:
            return value
        shown = value if is_number or isinstance(value, str) else type(value).__name__
        raise ValueError(f"{self.sentence}, but is {str(shown)[:40]!r}")

    def __get_pydantic_core_schema__(self, _: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate with `accepted` alone: the errors of a union would name both types."""
        del handler
        return core_schema.no_info_plain_validator_function(self.accepted)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return both forms."""
        del handler
        percent = {"type": "string", "pattern": PERCENT, "maxLength": PERCENT_MAX_LENGTH}
        return {"oneOf": [{"type": "integer", "minimum": 0, "maximum": self.most}, percent]}


def is_zero(value: int | str) -> bool:
    """Return True for 0 and "0%"."""
    return str(value) in ZERO


def number_of_pods(value: int | str, desired: int, *, round_up: bool) -> int:
    """Return the number of pods: a percentage is of `desired` pods, rounded up or down.

    Worked example: 25% of 5 pods is 2 rounded up and 1 rounded down.
    """
    if isinstance(value, int):
        return value
    hundredths = int(value.removesuffix("%")) * desired
    return -(-hundredths // 100) if round_up else hundredths // 100
