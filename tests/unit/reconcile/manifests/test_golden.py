"""What each service is made of, kept in files: every change of a child shows as a diff."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import pytest

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH
from fleetkeeper.common.values import Manifest
from tests.support.reconcile.golden_files import (
    FOLDER,
    REGENERATE,
    children_of,
    golden_text,
    pinned_hashes,
    readable,
    same,
    stored_children,
    template_hashes,
    text_of,
)
from tests.support.reconcile.golden_services import CASES


def _difference(name: str) -> str:
    """Return how the children of a case that are built now differ from the stored ones."""
    stored, now = (text_of(found(name)).splitlines() for found in (stored_children, children_of))
    return "\n".join(difflib.unified_diff(stored, now, "stored", "now", n=8, lineterm=""))


@pytest.mark.parametrize("name", CASES)
def test_children_are_those_of_the_golden_file(name: str) -> None:
    """A change of a builder shows in the files and is accepted on purpose."""
    path = FOLDER / f"{name}.yaml"
    assert path.exists(), f"no golden file for {name}; write it with {REGENERATE}"
    if not same(stored_children(name), children_of(name)):
        pytest.fail(
            f"the children of {name} changed; if that is intended, run {REGENERATE} and review the "
            f"diff\n{_difference(name)}",
            pytrace=False,
        )
    assert golden_text(name) == path.read_text(), (
        f"{path.name} is not the shortest patch; run {REGENERATE}"
    )


def test_there_are_at_least_forty_golden_services_and_no_stale_file() -> None:
    """Each file belongs to a case."""
    assert len(CASES) >= 40
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(CASES)


def _variants(value: Any) -> Iterator[Any]:
    """Yield copies of a value with one part changed, missing, extra or moved."""
    if isinstance(value, dict):
        yield {**value, "extra": "new"}
        for key, item in value.items():
            yield {other: kept for other, kept in value.items() if other != key}
            yield from ({**value, key: variant} for variant in _variants(item))
    elif isinstance(value, list):
        yield [*value, "new"]
        if value != value[::-1]:
            yield value[::-1]
        for number, item in enumerate(value):
            before, after = value[:number], value[number + 1 :]
            yield before + after
            yield from ([*before, variant, *after] for variant in _variants(item))
    else:
        yield f"{value} "
        yield [value]
        if isinstance(value, bool):
            yield int(value)


@pytest.mark.parametrize("child", CASES["everything"].children(), ids=lambda child: child["kind"])
def test_the_notation_shows_each_variant_of_a_child(child: Manifest) -> None:
    """Only the hash of a pod template is not in the files: it is pinned in a file of its own."""
    stored = readable(child)
    hidden = [variant for variant in _variants(child) if same(readable(variant), stored)]
    assert len(hidden) == (2 if child["kind"] == "Deployment" else 0)
    for variant in hidden:
        annotations = variant["spec"]["template"]["metadata"]["annotations"]
        own = child["spec"]["template"]["metadata"]["annotations"]
        annotations[ANNOTATION_TEMPLATE_HASH] = own[ANNOTATION_TEMPLATE_HASH]
        assert variant == child


@pytest.mark.parametrize("name", CASES)
def test_an_operator_upgrade_restarts_nothing(name: str) -> None:
    """The pod templates of a spec that exists today never change."""
    assert template_hashes(CASES[name]) == pinned_hashes().get(name), (
        f"a pod template of {name} would change, so an upgrade of the operator would restart the engines "
        "or routers of every such service. Make the new part depend on something new (a field, a profile, a "
        f"contract version). Only before the first release: {REGENERATE} --accept-restarts"
    )


def test_every_pinned_hash_belongs_to_a_case() -> None:
    """A case that went away takes its pin with it, in the open."""
    assert set(pinned_hashes()) == set(CASES)
