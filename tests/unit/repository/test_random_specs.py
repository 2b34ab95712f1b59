"""Random specs are independent of each other."""

from __future__ import annotations

import random
from typing import Any

from tests.support.reconcile.random_specs import random_spec


def spoil(value: Any) -> None:
    """Empty every object and list below."""
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            spoil(inner)
    value.clear()


def test_a_spoiled_spec_changes_no_later_one() -> None:
    """Tests spoil what they get, for example to see it refused."""
    before = [repr(random_spec(random.Random(seed))) for seed in range(300)]
    for seed in range(300):
        spoil(random_spec(random.Random(seed)))
    assert [repr(random_spec(random.Random(seed))) for seed in range(300)] == before
