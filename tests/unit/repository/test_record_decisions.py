"""The record of decisions repeats itself; else it could not show that a change of structure kept them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.autoscale.record_decisions import record_plans, record_ticks, scenarios


@pytest.mark.exhaustive
def test_a_record_is_the_same_each_time(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first", "second")]
    for path in paths:
        assert record_plans(path.with_suffix(".plans"), seeds=2) > 100
        assert record_ticks(path.with_suffix(".ticks"), [next(scenarios())]) == 361
    for kind in (".plans", ".ticks"):
        first, second = (path.with_suffix(kind).read_text() for path in paths)
        assert first == second
