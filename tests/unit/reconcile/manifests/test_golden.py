"""What each service is made of, kept in files: every change of a child shows as a diff."""

from __future__ import annotations

import pytest

from tests.support.golden_files import FOLDER, golden_text, pinned_hashes, template_hashes
from tests.support.golden_services import CASES

REGENERATE = ".venv/bin/python -m tests.support.golden_files"


@pytest.mark.parametrize("name", CASES)
def test_children_are_those_of_the_golden_file(name: str) -> None:
    """A change of a builder shows in the files and is accepted on purpose."""
    path = FOLDER / f"{name}.yaml"
    assert path.exists(), f"no golden file for {name}; write it with {REGENERATE}"
    assert golden_text(name) == path.read_text(), (
        f"the children of {name} changed; if that is intended, run {REGENERATE} and read the diff"
    )


def test_there_are_at_least_forty_golden_services_and_no_stale_file() -> None:
    """Each file belongs to a case."""
    assert len(CASES) >= 40
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(CASES)


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
