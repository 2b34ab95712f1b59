"""The numbers on the page of the control loop are those of the code."""

from __future__ import annotations

import doctest

from fleetkeeper import autoscale


def test_the_page_of_the_package_computes_what_it_says() -> None:
    found = doctest.testmod(autoscale)
    assert found.attempted >= 12
    assert found.failed == 0
