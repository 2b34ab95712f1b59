"""Stores of the tests in this folder are closed after each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gateway.usage_ledgers import STORES


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while STORES:
        STORES.pop().close()
