"""Digests: equal exactly when an apply would change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH
from fleetkeeper.reconcile.digest import digest_of, template_hash_of
from tests.support.reconcile.golden_services import CASES


def _deployment() -> dict[str, Any]:
    (engine, *_) = (
        child for child in CASES["minimal-cuda"].children() if child["kind"] == "Deployment"
    )
    return copy.deepcopy(engine)


def test_the_address_of_an_object_is_no_part_of_its_digest() -> None:
    """What is owned is compared; the name was the way to find it."""
    one, other = _deployment(), _deployment()
    other["metadata"]["name"], other["metadata"]["namespace"] = "other", "elsewhere"
    del other["apiVersion"], other["kind"]
    assert digest_of(one) == digest_of(other)


def test_replicas_of_a_deployment_are_compared_apart() -> None:
    """Scaling is a decision of its own, with its own preconditions."""
    one, other = _deployment(), _deployment()
    other["spec"]["replicas"] = 7
    assert digest_of(one) == digest_of(other)


def test_replicas_of_other_kinds_count() -> None:
    """Only a Deployment has a number that others may write."""
    assert digest_of({"kind": "X", "spec": {"replicas": 1}}) != digest_of(
        {"kind": "X", "spec": {"replicas": 2}}
    )


def test_empty_values_do_not_count() -> None:
    """The API server drops them when it stores an object."""
    bare = {"kind": "ConfigMap", "data": {"a": "1"}}
    full = {**bare, "metadata": {"labels": {}, "annotations": None}, "list": []}
    assert digest_of(bare) == digest_of(full)


def test_false_zero_and_the_empty_text_count() -> None:
    """They are values, not absences: a label may have to be empty."""
    assert digest_of({"matchLabels": {"a": ""}}) != digest_of({"matchLabels": {}})
    assert digest_of({"spec": {"a": False}}) != digest_of({"spec": {}})
    assert digest_of({"spec": {"a": 0}}) != digest_of({"spec": {}})


def test_the_order_of_keys_does_not_count_and_that_of_items_does() -> None:
    """Maps have no order; the order of containers, arguments and variables has a meaning."""
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of({"a": [1, 2]}) != digest_of({"a": [2, 1]})


@pytest.mark.parametrize(
    "path",
    [
        ("spec", "template", "spec", "containers", 0, "image"),
        ("spec", "template", "spec", "containers", 0, "env", 0, "value"),
        ("spec", "strategy", "rollingUpdate", "maxSurge"),
        ("metadata", "labels", "fleetkeeper.io/service"),
        ("metadata", "ownerReferences", 0, "uid"),
    ],
)
def test_every_other_field_counts(path: tuple[Any, ...]) -> None:
    """A hand edit anywhere in what we own is seen."""
    changed = _deployment()
    at: Any = changed
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = "changed"
    assert digest_of(changed) != digest_of(_deployment())


def test_no_two_children_of_the_golden_services_share_a_digest_without_being_equal() -> None:
    """Sixteen hexadecimal digits distinguish all of them."""
    seen: dict[str, Any] = {}
    for case in CASES.values():
        for child in case.children():
            bare = copy.deepcopy(child)
            bare["spec"].pop("replicas", None) if bare["kind"] == "Deployment" else None
            del bare["metadata"]["name"]
            other = seen.setdefault(digest_of(child), bare)
            assert other == bare


def test_the_template_hash_leaves_itself_out_and_nothing_else() -> None:
    """Written into the template, it stays what it was; an empty selector is not an absent one."""
    template = _deployment()["spec"]["template"]
    assert template_hash_of(template) == template["metadata"]["annotations"].pop(
        ANNOTATION_TEMPLATE_HASH
    )
    before = template_hash_of(template)
    template["spec"]["affinity"] = {"podAffinity": {"labelSelector": {}}}
    with_empty = template_hash_of(template)
    template["spec"]["affinity"] = {"podAffinity": {}}
    assert len({before, with_empty, template_hash_of(template)}) == 3
