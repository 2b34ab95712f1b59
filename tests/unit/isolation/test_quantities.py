"""A quantity of a spec is a bounded number or a mistake of that spec, never an arithmetic error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.parse import InvalidService, parse_service
from fleetkeeper.api.values.quantity import BadQuantity, canonical_quantity, parse_quantity
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.types import Snapshot
from fleetkeeper.runtime.settings import SettingsError, load_settings

LARGE = ("1e999", "1E+999", "-1e400", "1e0099", "1e999999999")
FIELDS = ("cpu", "memory", "sharedMemory", "ephemeralStorage")
NUMBERS = st.from_regex(r"[+-]?[0-9]{0,20}\.?[0-9]{0,20}", fullmatch=True)
EXPONENTS = st.builds("{}{:d}".format, st.sampled_from("eE"), st.integers(-2000, 2000))
SUFFIXES = st.sampled_from(["", "n", "m", "k", "E", "Ki", "Ei", "KB"])
NEAR_QUANTITIES = st.builds("{}{}".format, NUMBERS, EXPONENTS | SUFFIXES)


def manifest(**resources: str) -> dict[str, Any]:
    return {
        "apiVersion": "fleetkeeper.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"namespace": "team-a", "name": "chat", "uid": "u", "generation": 1},
        "spec": {"model": {"source": "pvc://models/llama"}, "resources": resources},
    }


@given(text=st.text() | NEAR_QUANTITIES)
def test_any_text_is_a_quantity_or_a_bad_quantity(text: str) -> None:
    for read in (parse_quantity, canonical_quantity):
        try:
            read(text)
        except BadQuantity:
            continue


@pytest.mark.parametrize("text", LARGE)
def test_an_exponent_of_three_digits_is_no_quantity(text: str) -> None:
    with pytest.raises(BadQuantity, match="such as 32Gi"):
        parse_quantity(text)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("text", [*LARGE, "1e30", "1e99", "9E", "-1", "0", "NaN", "Infinity"])
def test_a_spec_with_such_a_quantity_is_invalid_and_the_mistake_names_its_field(
    field: str, text: str
) -> None:
    with pytest.raises(InvalidService) as refusal:
        parse_service(manifest(**{field: text}))
    assert {error.path for error in refusal.value.errors} == {f"spec.resources.{field}"}


@pytest.mark.parametrize(
    ("field", "most"),
    [("cpu", "10k"), ("memory", "1Pi"), ("sharedMemory", "1Pi"), ("ephemeralStorage", "1Pi")],
)
def test_the_bound_of_a_quantity_stands_in_the_message(field: str, most: str) -> None:
    with pytest.raises(InvalidService) as refusal:
        parse_service(manifest(**{field: "1e30"}))
    (error,) = refusal.value.errors
    assert f"at most {most}" in error.message


@pytest.mark.parametrize("name", ["cpu", "memory"])
@pytest.mark.parametrize("text", ["1e999", "256MB", ""])
def test_a_setting_that_is_no_quantity_ends_the_start_and_not_every_plan(
    name: str, text: str
) -> None:
    with pytest.raises(SettingsError, match=f"router.{name}: .* such as 32Gi"):
        load_settings(router={name: text})


@pytest.mark.parametrize("text", [*LARGE, "1e30"])
def test_a_service_older_than_the_bound_is_stalled_with_an_invalid_spec(text: str) -> None:
    """It lies in etcd since a CRD without the bound: the operator must live with it."""
    plan = decide_plan(Snapshot(resource=manifest(memory=text)), default_context(), 1_000_000.0)
    assert plan.actions == ()
    assert plan.status is not None
    stalled = next(c for c in plan.status["conditions"] if c["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "InvalidSpec")
    assert "spec.resources.memory" in stalled["message"]
