"""The generated schema: bounded everywhere, structural, described, and never changing a default."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from fleetkeeper.api import names
from fleetkeeper.api.base import LABEL_KEY, LABEL_VALUE, Section
from fleetkeeper.api.conditions import ConditionType
from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.schema.crd import crd_text, desired_crd
from fleetkeeper.api.schema.openapi import object_schema
from fleetkeeper.api.schema.rules import NAME_RULES, RULES
from tests.support.reconcile.service_cases import cases

ROOT = Path(__file__).resolve().parents[3]
DEFAULTS = ROOT / "tests" / "golden" / "api" / "defaults.json"
Node = dict[str, Any]


def schema() -> Node:
    version: Node = desired_crd()["spec"]["versions"][0]
    root: Node = version["schema"]["openAPIV3Schema"]
    return root


def nodes(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    yield path, node
    for key, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key], f"{path}[]")


def test_the_text_of_the_crd_is_the_crd() -> None:
    assert yaml.safe_load(crd_text()) == desired_crd()


def test_every_string_list_map_and_number_is_bounded() -> None:
    for path, node in nodes(schema()):
        kind = node.get("type")
        if kind == "string" and "enum" not in node:
            assert "maxLength" in node, path
        if kind == "array":
            assert "maxItems" in node, path
            assert node["x-kubernetes-list-type"] in {"map", "atomic"}, path
        if kind == "integer":
            assert "minimum" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_every_number_of_the_spec_has_an_upper_bound() -> None:
    for path, node in nodes(schema()["properties"]["spec"]):
        assert node.get("type") != "integer" or "maximum" in node, path


def test_every_field_is_described_and_descriptions_end_like_sentences() -> None:
    for path, node in nodes(schema()):
        if path and not path.endswith("[]") and path != ".metadata":
            assert len(node.get("description", "")) > 3, path
            assert node["description"].endswith("."), path


def test_the_description_contains_default_and_bounds() -> None:
    for path, node in nodes(schema()["properties"]["spec"]):
        if isinstance(node.get("default"), (int, str, bool)):
            assert "Default: " in node["description"], path
        if "maximum" in node and not path.endswith("[]"):
            assert f"From {node['minimum']} to {node['maximum']}." in node["description"], path


def test_a_name_with_a_unit_ends_with_the_unit() -> None:
    units = {
        "Milliseconds": "milliseconds",
        "Seconds": "econds",
        "Percent": "percent",
        "Tokens": "okens",
    }
    for path, node in nodes(schema()["properties"]["spec"]):
        for ending, unit in units.items():
            if path.endswith(ending) and node.get("type") == "integer":
                assert unit in node["description"], path


def test_nothing_is_nullable_and_nothing_is_open() -> None:
    text = json.dumps(desired_crd())
    for word in ("nullable", "$ref", "anyOf", "oneOf", "preserve-unknown-fields"):
        assert word not in text


@pytest.mark.promise("restricted-pods", "no-addresses")
def test_no_field_names_another_namespace_an_address_or_a_raw_pod() -> None:
    forbidden = {
        "namespace", "namespaces", "url", "uri", "endpoint", "address", "image", "command", "args",
        "template", "hostPath", "path", "envFrom", "volumes", "securityContext",
    }  # fmt: skip
    keys = {path.rpartition(".")[2] for path, _ in nodes(schema()["properties"]["spec"])}
    assert not keys & forbidden


def test_every_object_with_defaults_inside_has_a_default_itself() -> None:
    """Otherwise the defaults inside an absent object would not be filled in."""
    for path, node in nodes(schema()["properties"]["spec"]):
        for key, inner in node.get("properties", {}).items():
            is_optional = key not in node.get("required", ())
            defaults_all = inner.get("properties") and not inner.get("required")
            if is_optional and defaults_all and "default" not in inner:
                assert f"{path}.{key}".replace(".routing.placement.", ".placement.") in {
                    ".model.cache",
                    ".resources.accelerator",
                    ".scaling.sleep",
                    ".networkPolicy.namespaceSelector",
                    ".networkPolicy.peers[].podSelector",
                    ".networkPolicy.peers[].namespaceSelector",
                    ".placement.affinity.nodeAffinity",
                    ".placement.affinity.podAffinity",
                    ".placement.affinity.podAntiAffinity",
                    ".placement.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution",
                }, f"{path}.{key}"


def test_defaults_never_change() -> None:
    """A default that reaches the pod template would restart every engine; new fields may be added.

    To add one, add its line to the golden file; a line there is never changed.
    """
    now = {
        path.lstrip("."): node["default"]
        for path, node in nodes(schema()["properties"]["spec"])
        if "default" in node and not isinstance(node["default"], dict)
    }
    assert now == json.loads(DEFAULTS.read_text())


def test_the_parser_fills_in_the_schemas_defaults() -> None:
    spec = parse_service(cases()[0].manifest()).spec.to_manifest()
    for path, value in json.loads(DEFAULTS.read_text()).items():
        here: Any = spec
        for key in path.split("."):
            here = here.get(key) if isinstance(here, dict) else None
        if here is None:  # within an object that is absent by default
            assert path.split(".")[0] in {
                "model",
                "resources",
                "scaling",
                "placement",
                "routing",
                "networkPolicy",
            }, path
        else:
            assert here == value, path


def test_a_default_written_on_an_object_is_what_its_fields_default_to() -> None:
    for path, node in nodes(schema()["properties"]["spec"]):
        if node.get("properties") and node.get("default"):
            inner = {
                key: of["default"] for key, of in node["properties"].items() if "default" in of
            }
            assert node["default"] == inner, path


def test_the_resource_has_no_fractions() -> None:
    """Clients round them differently. Only the settings of an engine profile may be fractions."""
    assert [path for path, node in nodes(schema()) if node.get("type") == "number"] == []


def test_columns_scale_and_names_are_those_of_the_reference() -> None:
    spec = desired_crd()["spec"]
    version = spec["versions"][0]
    assert [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")] == [
        "READY", "WANTED", "SUSPEND", "SEQUENCES", "TOKENS", "BREAKER", "AGE",
    ]  # fmt: skip
    paths = {path for path, _ in nodes(schema())}
    conditions = {f'.status.conditions[?(@.type=="{kind}")].reason' for kind in ConditionType}
    for column in version["additionalPrinterColumns"]:
        assert column["jsonPath"] in paths | conditions | {".metadata.creationTimestamp"}
    assert set(version["subresources"]["scale"].values()) <= paths
    assert spec["names"]["shortNames"] == ["fis"]
    assert desired_crd()["metadata"]["name"] == "inferenceservices.fleetkeeper.io"


def test_conditions_are_a_list_map_by_type_that_holds_every_type() -> None:
    conditions = schema()["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert conditions["maxItems"] >= len(ConditionType)
    assert all(
        str(kind) in conditions["items"]["properties"]["type"]["description"]
        for kind in ConditionType
    )


def test_every_rule_is_broken_by_some_case_of_the_table_and_kept_by_another() -> None:
    """A rule that nothing tries could be anything."""
    tried = {case.says for case in cases() if case.reject}
    for model, rules in RULES.items():
        for rule in rules:
            if rule.cel and "isQuantity" not in rule.cel:
                assert any(said and said in rule.message for said in tried), (model, rule.message)
    for sentence in sentences():
        assert any(said and said in sentence for said in tried), sentence
    for name_rule in NAME_RULES:
        assert any(said and said in name_rule.message for said in tried)


def sentences() -> set[str]:
    """The sentences about values that do not have the form of their field."""
    found = set()
    for _, node in nodes(schema()["properties"]["spec"]):
        for rule in node.get("x-kubernetes-validations", ()):
            if "properties" not in node:
                shown = re.findall(r'"(?:[^"\\]|\\.)*"', rule.get("messageExpression", ""))
                found |= {rule["message"], *(json.loads(text) for text in shown)}
    return found


def test_messages_of_rules_say_what_to_do_in_one_short_sentence() -> None:
    messages = [rule.message for rules in (*RULES.values(), NAME_RULES) for rule in rules]
    for message in (*messages, *sentences()):
        assert 10 <= len(message) <= 160, message
        assert not message.endswith("."), message


def test_a_pattern_is_the_answer_only_in_lists_of_labels() -> None:
    """Their rules cost the API server too much; all other fields have a sentence."""
    patterns = {
        node["pattern"] for _, node in nodes(schema()["properties"]["spec"]) if "pattern" in node
    }
    assert patterns == {LABEL_KEY, LABEL_VALUE}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"__annotations__": {"a": str}, "a": Field(description="A.")}, "maximum length"),
        ({"__annotations__": {"a": int}, "a": Field(description="A.")}, "minimum"),
        ({"__annotations__": {"a": tuple[bool, ...]}, "a": Field(description="A.")}, "maximum length"),
        ({"__annotations__": {"a": bool}}, "no description"),
        ({"__annotations__": {"a": float}, "a": Field(description="A.")}, "minimum"),
        ({"__annotations__": {"a": bytes}, "a": Field(description="A.")}, "no schema for"),
    ],
)  # fmt: skip
def test_a_field_without_bounds_or_words_cannot_be_generated(section: Node, words: str) -> None:
    model = type("Sample", (Section,), {"__module__": __name__, **section})
    with pytest.raises(TypeError, match=words):
        object_schema(model)


def test_names_of_children_fit_and_never_collide_with_services() -> None:
    longest = "a" * names.NAME_MAX_LENGTH
    children = [
        names.router_name(longest),
        names.disruption_name(longest),
        names.engine_policy_name(longest),
        names.router_policy_name(longest),
        names.control_config_name(longest),
    ]
    assert all(len(name) <= 63 and names.CHILD_INFIX in name for name in children)
    assert names.selector_text("chat") == (
        "fleetkeeper.io/service=chat,fleetkeeper.io/component=engine"
    )
    assert names.service_url("chat", "team-a") == "http://chat.team-a.svc:80/v1"


def test_the_enums_of_the_status_are_those_that_are_closed_for_good() -> None:
    """A reason is none: an older CRD would refuse the status of a newer operator."""
    status = schema()["properties"]["status"]
    found = {path for path, node in nodes(status) if isinstance(node, dict) and "enum" in node}
    assert {path.removeprefix(".") for path in found} == {
        "breaker.control",
        "breaker.load.batch",
        "breaker.load.realtime",
        "breaker.load.standard",
        "breaker.source",
        "conditions[].status",
        "decisions[].what",
        "replicaStates[].stage",
        "sleep.state",
    }
