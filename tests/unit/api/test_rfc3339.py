"""Times in the format of Kubernetes."""

from __future__ import annotations

import pytest

from fleetkeeper_contract import rfc3339


@pytest.mark.parametrize("moment", [0.0, 1767225600.0, 1767225600.9])
def test_a_time_round_trips_in_whole_seconds(moment: float) -> None:
    assert rfc3339.parse(rfc3339.format(moment)) == int(moment)


def test_the_format_is_that_of_kubernetes() -> None:
    assert rfc3339.format(1767225600.9) == "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    "text", ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00.000000Z", "2026-01-01T01:00:00+01:00"]
)
def test_fractions_and_offsets_are_read(text: str) -> None:
    assert rfc3339.parse(text) == 1767225600.0


@pytest.mark.parametrize("text", [None, 7, "", "nonsense", "2026-13-01T00:00:00Z"])
def test_anything_else_is_no_time(text: object) -> None:
    assert rfc3339.parse(text) is None
