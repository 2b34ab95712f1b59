"""What the faster lanes of the tests leave out: the marks `slow` and `exhaustive`, and examples of properties."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pytest
from hypothesis import settings

FULL_EXAMPLES: Final = 100
"""Of the profile that `make test` uses; the figures given to `examples` are meant for it."""


def examples(count: int) -> settings:
    """Return settings with so many examples, scaled as the lane's Hypothesis profile says.

    A plain `@settings(max_examples=200)` would be the same in every lane.
    """
    return settings(max_examples=max(1, count * settings().max_examples // FULL_EXAMPLES))


def keep_first(keep: int, values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    """Return parameters of which the first `keep` run in every lane; the others have the mark."""
    found = list(values)
    return [*found[:keep], *(pytest.param(value, marks=mark) for value in found[keep:])]
