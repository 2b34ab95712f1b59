"""The generated reference names every field, reason and option."""

from __future__ import annotations

from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.api.options import ALLOWED
from fleetkeeper.api.schema.reference import generated_files
from fleetkeeper.api.types import InferenceServiceSpec

PAGES = generated_files()


def test_every_section_of_the_spec_has_a_table_and_bounds_stand_once() -> None:
    page = PAGES["docs/reference/inferenceservice.md"]
    for name, info in InferenceServiceSpec.model_fields.items():
        assert f"| `{info.alias or name}`" in page
    assert "### spec.tiers.batch\n" in page
    assert "### spec.model.adapters[]\n" in page
    row = next(line for line in page.splitlines() if line.startswith("| `capPercent`"))
    assert row.startswith("| `capPercent` | integer, 10 to 95 | `80` | ")
    assert "Default:" not in row
    assert "From 10" not in row


def test_every_condition_reason_and_option_is_there() -> None:
    for word in (*ConditionType, *Reason):
        assert f"| `{word}` | {word.text} |" in PAGES["docs/reference/conditions.md"]
    for name in ALLOWED:
        assert f"| `{name}` |" in PAGES["docs/reference/engine-options.md"]
