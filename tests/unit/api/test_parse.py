"""Parsing: all mistakes at once, in plain words; nothing hostile gets further; values stay frozen."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fleetkeeper.api.names import API_VERSION, KIND
from fleetkeeper.api.parse import InvalidService, parse_service
from fleetkeeper.api.schema.error_messages import FieldError, path_text
from fleetkeeper.api.types import Dtype, InferenceServiceSpec, RoutingPolicy
from tests.support.reconcile.service_cases import cases

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
FIELDS = sorted(info.alias or name for name, info in InferenceServiceSpec.model_fields.items())


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "chat", "namespace": "team-a"},
        "spec": {"model": {"source": "pvc://models/llama"}, **spec},
    }


def lines_of(broken: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidService) as problem:
        parse_service(broken)
    return [str(error) for error in problem.value.errors]


def test_every_mistake_is_reported_at_once_also_between_fields_of_valid_sections() -> None:
    broken = manifest(
        enginee={},
        scaling={"minReplicas": 9},
        rollout={"maxSurge": 0},
        batching={"mode": "auto"},
        engine={"tensorParallelSize": 0},
    )
    broken["metadata"]["name"] = "7-fk-x"
    broken["apiVersion"] = "fleetkeeper.io/v2"
    lines = lines_of(broken)
    for words in (
        "apiVersion: must be fleetkeeper.io/v1alpha1",
        "metadata.name: .* 50 ",
        "metadata.name: .* -fk-",
        "spec.enginee: .* engine",
        "spec.batching.mode: .*'Auto', 'Advisory' or 'Fixed'.*'auto'",
        "spec.engine.tensorParallelSize: must be at least 1.* 0",
        "spec.scaling.maxReplicas: .*minReplicas",
        "spec.rollout.maxSurge: maxSurge and maxUnavailable are both 0",
    ):
        assert any(re.match(words, line) for line in lines), (words, lines)
    assert len(lines) == 8


@pytest.mark.parametrize(
    ("spec", "path", "words"),
    [
        ({"resources": {"cpu": 0.5}}, "spec.resources.cpu", ("an integer or a string", '"0.5"')),
        ({"resources": {"cpu": True}}, "spec.resources.cpu", ("an integer or a string", "500m")),
        ({"engine": {"options": {"enforce-eager": True}}}, "spec.engine.options.enforce-eager", ("a string", '"true"')),
        ({"replicas": "3"}, "spec.replicas", ("an integer", "'3'")),
        ({"replicas": 3.5}, "spec.replicas", ("an integer", "3.5")),
        ({"replicas": 10**30}, "spec.replicas", ("at most 1000", "1000000000000000000000000000000")),
        ({"paused": 1}, "spec.paused", ("true or false", " 1")),
        ({"scaling": []}, "spec.scaling", ("an object", "[]")),
        ({"imagePullSecrets": {}}, "spec.imagePullSecrets", ("a list", "{}")),
        ({"scaling": {"minReplica": 2}}, "spec.scaling.minReplica", ("unknown", "minReplicas")),
        ({"disruption": {"x": 1}}, "spec.disruption.x", ("unknown", "maxUnavailable")),
        ({"resources": {"memory": "32GB"}}, "spec.resources.memory", ("'32GB'", "32Gi")),
        ({"podMetadata": {"labels": {"a": None}}}, "spec.podMetadata.labels.a", ("a string", "null")),
        ({"memory": {"capPercent": 96}}, "spec.memory.capPercent", ("at most 95", "96")),
        ({"model": {"source": "pvc://m/x", "servedName": "a" * 129}}, "spec.model.servedName", ("at most 128",)),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_in_plain_words(
    spec: dict[str, Any], path: str, words: tuple[str, ...]
) -> None:
    (line,) = lines_of(manifest(**spec))
    named, _, message = line.partition(": ")
    assert named == path
    for word in words:
        assert word in message


@pytest.mark.parametrize("spec", [None, [], "x", 3])
def test_a_value_that_is_no_spec_is_reported(spec: object) -> None:
    broken = manifest()
    broken["spec"] = spec
    (line,) = lines_of(broken)
    assert line.startswith("spec: is missing")
    assert "spec.model.source" in line


def test_a_value_that_is_no_metadata_is_reported() -> None:
    broken = manifest()
    broken["metadata"] = None
    assert lines_of(broken)[0].startswith("metadata: is missing")
    assert "metadata.name" in lines_of(broken)[0]


@given(field=st.sampled_from(FIELDS), value=JSON)
def test_any_value_in_a_field_is_parsed_or_reported(field: str, value: Any) -> None:
    """No input makes the parser fail in another way: a worker would try it for ever."""
    errors: tuple[FieldError, ...] = ()
    try:
        assert parse_service(manifest(**{field: value})).name == "chat"
    except InvalidService as problem:
        errors = problem.errors
    assert all(error.path.startswith("spec") and error.message for error in errors)


@given(value=JSON)
def test_any_manifest_is_parsed_or_reported(value: Any) -> None:
    with pytest.raises(InvalidService):
        parse_service({"apiVersion": API_VERSION, "kind": KIND, "metadata": value, "spec": value})


def test_parsing_changes_nothing_in_the_manifest() -> None:
    for case in cases():
        given_, before = case.manifest(), case.manifest()
        with contextlib.suppress(InvalidService):
            parse_service(given_)
        assert given_ == before


def test_a_source_of_a_wrong_form_keeps_the_rules_of_its_scheme() -> None:
    broken = manifest(model={"source": "s3://models/llama/", "cache": {"claimName": "hub"}})
    paths = [line.partition(":")[0] for line in lines_of(broken)]
    assert paths == ["spec.model.source", "spec.model.credentialsSecret", "spec.model.cache"]
    (line,) = lines_of(manifest(model={"source": "org/name", "cache": {"claimName": "hub"}}))
    assert line.startswith("spec.model.source: for a model on Hugging Face")


def test_a_number_is_the_same_quantity_as_its_text() -> None:
    """An upgrade of the CRD, or a chart that prints numbers, restarts nothing."""
    numbers = {"cpu": 6, "memory": 2**35, "sharedMemory": 2**30, "ephemeralStorage": 2**36}
    texts = {name: str(number) for name, number in numbers.items()}
    one, other = (parse_service(manifest(resources=these)).spec for these in (numbers, texts))
    assert one == other


def test_what_is_written_out_parses_to_the_same_values() -> None:
    """Also without the defaults, and with every default written out."""
    for case in cases():
        if case.reject is not None:
            continue
        spec = parse_service(case.manifest()).spec
        again = {**case.manifest(), "spec": json.loads(json.dumps(spec.to_manifest()))}
        assert parse_service(again).spec == spec


def test_the_object_around_the_spec_is_read() -> None:
    live = manifest() | {"status": {"url": "x"}}
    live["metadata"] |= {
        "uid": "u",
        "generation": 7,
        "resourceVersion": "12",
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "creationTimestamp": "2025-01-01T00:00:00Z",
        "labels": {"a": "b"},
        "annotations": {"c": "d"},
    }
    service = parse_service(live)
    assert (service.namespace, service.name, service.uid) == ("team-a", "chat", "u")
    assert (service.generation, service.resource_version, service.deleting) == (7, "12", True)
    assert (service.status, service.labels, service.annotations) == (
        {"url": "x"},
        {"a": "b"},
        {"c": "d"},
    )


def test_values_cannot_be_changed() -> None:
    spec = parse_service(manifest(podMetadata={"labels": {"a": "b"}})).spec
    with pytest.raises(ValidationError):
        spec.engine.dtype = Dtype.FLOAT16  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.pod_metadata.labels["a"] = "c"  # type: ignore[index]


def test_maps_are_sorted_so_that_order_in_the_file_changes_nothing() -> None:
    one = parse_service(manifest(podMetadata={"labels": {"b": "1", "a": "2"}})).spec
    assert list(one.pod_metadata.labels) == ["a", "b"]


def test_the_routing_policy_none_is_a_word_and_no_absence() -> None:
    spec = parse_service(manifest(routing={"policy": "None"})).spec
    assert spec.routing.policy is RoutingPolicy.NONE


def test_floating_revisions_are_taken_where_settings_allow_them() -> None:
    service = copy.deepcopy(manifest(model={"source": "hf://a/b", "revision": "main"}))
    assert "must be a commit" in lines_of(service)[0]
    assert parse_service(service, allow_floating_revisions=True).spec.model.revision == "main"


def test_paths_are_written_as_kubernetes_writes_them() -> None:
    assert path_text("spec", "model", "adapters", 0, "name") == "spec.model.adapters[0].name"


def test_values_that_only_yaml_has_are_reported() -> None:
    odd = manifest(replicas=float("nan"), engine={"options": {"seed": b"1"}, "env": {1: {2}}})
    odd["metadata"] |= {"generation": "x", "labels": [], "annotations": 3}
    assert [line.partition(":")[0] for line in lines_of(odd)] == [
        "spec.engine.env",
        "spec.replicas",
    ]
    del odd["spec"]["replicas"], odd["spec"]["engine"]["env"]
    odd["spec"]["engine"] = {}
    service = parse_service(odd)
    assert (service.generation, service.labels, service.annotations) == (0, {}, {})
