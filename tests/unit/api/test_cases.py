"""The operator's parser on the shared table of accepted and refused services."""

from __future__ import annotations

import pytest

from fleetkeeper.api.parse import InvalidService, parse_service
from fleetkeeper.api.profiles.defaults import default_catalog
from fleetkeeper.api.profiles.errors import profile_errors
from tests.support.reconcile.service_cases import Case, cases


def named(case: Case) -> str:
    return case.case


def test_the_table_is_large_and_names_are_unique() -> None:
    rows = cases()
    assert len(rows) >= 150
    assert len({row.case for row in rows}) == len(rows)
    assert sum(row.reject is None for row in rows) >= 50


@pytest.mark.parametrize("case", [c for c in cases() if not c.refused_by_operator], ids=named)
def test_a_good_service_is_parsed(case: Case) -> None:
    service = parse_service(case.manifest())
    assert (service.namespace, service.name) == ("team-a", case.name)


@pytest.mark.parametrize("case", [c for c in cases() if c.refused_by_operator], ids=named)
def test_a_bad_service_is_refused_with_its_field_and_what_to_do(case: Case) -> None:
    with pytest.raises(InvalidService) as problem:
        parse_service(case.manifest())
    found = {error.path: error.message for error in problem.value.errors}
    assert case.reject in found, found
    assert all(path.startswith(str(case.reject)) for path in found), found
    assert case.says in found[str(case.reject)]


@pytest.mark.parametrize("case", [c for c in cases() if c.by == "profile"], ids=named)
def test_what_only_the_engine_profile_can_judge_is_refused_by_it(case: Case) -> None:
    profile = default_catalog().resolve("cuda")
    (error,) = profile_errors(parse_service(case.manifest()).spec, profile)
    assert error.path == case.reject
    assert case.says in error.message


@pytest.mark.parametrize("case", [c for c in cases() if c.reject is None], ids=named)
def test_a_good_service_is_what_its_profile_can_give(case: Case) -> None:
    spec = parse_service(case.manifest()).spec
    names = {"cuda-0.32.0-1": "cuda"}
    profile = default_catalog().resolve(names.get(spec.engine.profile, spec.engine.profile))
    assert profile_errors(spec, profile) == []


def test_only_settings_and_profiles_refuse_what_the_api_server_takes() -> None:
    fields = {str(c.reject).rpartition(".")[2] for c in cases() if c.by == "operator"}
    assert fields == {"revision"}
    assert all(
        str(c.reject).startswith(
            (
                "spec.engine.options.",
                "spec.engine.env[",
                "spec.memory.capPercent",
                "spec.model.source",
            )
        )
        for c in cases()
        if c.by == "profile"
    )
