"""The generated reference names every field, reason and option, in tables that hold together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.api.options import ALLOWED
from fleetkeeper.api.schema.reference import generated_files
from fleetkeeper.api.types import InferenceServiceSpec

ROOT = Path(__file__).resolve().parents[3]
PAGES = generated_files()


@pytest.mark.parametrize("path", sorted(PAGES))
def test_the_page_in_the_repository_is_the_generated_one(path: str) -> None:
    assert (ROOT / path).read_text() == PAGES[path]


@pytest.mark.parametrize("path", sorted(PAGES))
def test_rows_have_as_many_cells_as_their_table(path: str) -> None:
    width = 0
    for line in PAGES[path].splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        width = width or cells
        assert cells == width, line


def test_every_section_of_the_spec_has_a_table_and_bounds_stand_once() -> None:
    page = PAGES["docs/reference/inferenceservice.md"]
    for name, info in InferenceServiceSpec.model_fields.items():
        assert f"| `{info.alias or name}`" in page
    assert "### spec.tiers.batch\n" in page
    assert "### spec.model.adapters[]\n" in page
    row = next(line for line in page.splitlines() if line.startswith("| `capPercent`"))
    assert row.startswith("| `capPercent` | integer, 10 to 80 | `80` | ")
    assert "Default:" not in row
    assert "From 10" not in row


def test_every_condition_reason_and_option_is_there() -> None:
    for word in (*ConditionType, *Reason):
        assert f"| `{word}` | {word.text} |" in PAGES["docs/reference/conditions.md"]
    for name in ALLOWED:
        assert f"| `{name}` |" in PAGES["docs/reference/engine-options.md"]
