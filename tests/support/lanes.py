"""What the faster lanes of the tests leave out: the marks `slow` and `exhaustive`, and examples of properties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pytest
from hypothesis import settings

from fleetkeeper_local.control_plane import ports

USUAL: Final = "make-test"
"""The Hypothesis profile that `make test` uses."""
EXAMPLES: Final = {"dev": 10, USUAL: 20, "exhaustive": 500}
"""Examples of a property by Hypothesis profile: `make test-fast`, `make test` and `make test-all`."""
FULL_EXAMPLES: Final = 100
"""The figures given to `examples` are relative to it."""


def examples(count: int, *, guarded: bool = False) -> settings:
    """Return settings with so many examples, scaled as the lane's Hypothesis profile says.

    A plain `@settings(max_examples=200)` would be the same in every lane. A property that is
    `guarded` has all of them in `make test` too: budgets, admission, digests and merges.
    """
    full = guarded and settings.get_current_profile_name() == USUAL
    share = FULL_EXAMPLES if full else settings().max_examples
    return settings(max_examples=max(1, count * share // FULL_EXAMPLES))


def keep_first(keep: int, values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    """Return parameters of which the first `keep` run in every lane; the others have the mark."""
    found = list(values)
    return [*found[:keep], *(pytest.param(value, marks=mark) for value in found[keep:])]


def share_of_ports(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return this worker's part of the range of ports: two workers that look for one find different ones."""
    number = int(environment.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    size, number = (ports.HIGHEST - ports.LOWEST) // count, number % count
    return ports.LOWEST + number * size, ports.LOWEST + (number + 1) * size
