"""What holds for the children of every spec that the API accepts: 100 to 5,000 random ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fleetkeeper.api.names import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY
from fleetkeeper.api.options import ALLOWED, option_errors
from fleetkeeper.api.parse import InferenceService, InvalidService, parse_service
from fleetkeeper.api.types import EnvironmentVariable
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.manifests.engine_document import EngineOptionRefused
from fleetkeeper.reconcile.wanted import refusals
from fleetkeeper_engine.spec import parse_document
from tests.support.reconcile.dangerous_metadata import ANNOTATIONS, LABELS, dangerous_in
from tests.support.reconcile.pod_security import violations_of_restricted
from tests.support.reconcile.random_specs import allowed, random_services, service_manifest

FEW_SERVICES, SERVICES, MORE_SERVICES = 100, 500, 5000
SCHEMA = Path(__file__).parents[4] / "engine_image" / "schemas" / "engine-document.schema.json"
CONTEXT = default_context()
Built = list[tuple[InferenceService, tuple[Manifest, ...]]]


@pytest.fixture(
    scope="module",
    params=[
        FEW_SERVICES,
        pytest.param(SERVICES, marks=pytest.mark.slow),
        pytest.param(MORE_SERVICES, marks=pytest.mark.exhaustive),
    ],
)
def built(request: pytest.FixtureRequest) -> Built:
    """The services and their children, half of them on each profile."""
    found: Built = []
    for number, service in enumerate(random_services(seed=5, count=request.param)):
        profile = CONTEXT.catalog.resolve(("cuda", "cpu")[number % 2])
        assert allowed(service, profile)
        found.append((service, desired_children(service, profile, CONTEXT, replicas=number % 9)))
    return found


def _deployments(children: tuple[Manifest, ...]) -> list[Manifest]:
    return [child for child in children if child["kind"] == "Deployment"]


def _engine_container(children: tuple[Manifest, ...]) -> Manifest:
    (container,) = _deployments(children)[0]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def _document(children: tuple[Manifest, ...]) -> str:
    env = {entry["name"]: entry.get("value") for entry in _engine_container(children)["env"]}
    return str(env["FLEETKEEPER_ENGINE"])


def _values(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _values(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from _values(item, (*path, "[]"))


@pytest.mark.promise("restricted-pods")
def test_pods_of_any_spec_are_restricted(built: Built) -> None:
    """Pod Security *restricted*, engines and routers."""
    templates = [
        deployment["spec"]["template"]
        for _, children in built
        for deployment in _deployments(children)
    ]
    assert len(templates) > len(built) * 1.5
    wrong = [found for template in templates if (found := violations_of_restricted(template))]
    assert not wrong, wrong[:3]


@pytest.mark.promise("pod-metadata")
def test_no_pod_of_any_spec_has_an_instruction_to_another_program(built: Built) -> None:
    """A third of the specs that were drawn ask for one; those are refused."""
    templates = [
        deployment["spec"]["template"]
        for _, children in built
        for deployment in _deployments(children)
    ]
    assert [found for template in templates if (found := dangerous_in(template))] == []


@pytest.mark.promise("pod-metadata")
@pytest.mark.parametrize(
    ("kind", "name"),
    [("annotations", name) for name in ANNOTATIONS] + [("labels", name) for name in LABELS],
)
def test_a_dangerous_label_or_annotation_is_refused(kind: str, name: str) -> None:
    """By the schema's rules if it is one of Kubernetes, else by the settings."""
    value = {"annotations": ANNOTATIONS, "labels": LABELS}[kind][name]
    spec = {"model": {"source": "pvc://m"}, "podMetadata": {kind: {name: value}}}
    try:
        service = parse_service(service_manifest(spec))
    except InvalidService as refusal:
        errors = list(refusal.errors)
    else:
        errors = refusals(service.spec, CONTEXT.catalog.resolve("cuda"), CONTEXT)
        assert name in errors[0].message
        assert "podMetadataNames" in errors[0].message
    assert [error.path for error in errors] == [f"spec.podMetadata.{kind}"]


def _set(*path: str | int, to: object) -> Callable[[Manifest], None]:
    def change(template: Manifest) -> None:
        at: Any = template["spec"]
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("hostNetwork", to=True),
        _set("hostPID", to=True),
        _set("hostIPC", to=True),
        _set("volumes", 0, to={"name": "a", "hostPath": {"path": "/"}}),
        _set("volumes", 0, to={"name": "a", "nfs": {"server": "a", "path": "/"}}),
        _set("securityContext", to={"runAsNonRoot": True}),
        _set("securityContext", "runAsNonRoot", to=False),
        _set("securityContext", "runAsUser", to=0),
        _set("securityContext", "seccompProfile", to={"type": "Unconfined"}),
        _set("securityContext", "sysctls", to=[{"name": "kernel.msgmax", "value": "1"}]),
        _set("securityContext", "seLinuxOptions", to={"user": "system_u"}),
        _set("containers", 0, "ports", 0, "hostPort", to=80),
        _set("containers", 0, "securityContext", to={}),
        _set("containers", 0, "securityContext", "privileged", to=True),
        _set("containers", 0, "securityContext", "procMount", to="Unmasked"),
        _set("containers", 0, "securityContext", "runAsUser", to=0),
        _set("containers", 0, "securityContext", "allowPrivilegeEscalation", to=True),
        _set("containers", 0, "securityContext", "capabilities", to={"drop": ["NET_RAW"]}),
        _set("containers", 0, "securityContext", "capabilities", "add", to=["NET_ADMIN"]),
        _set("containers", 0, "securityContext", "appArmorProfile", to={"type": "Unconfined"}),
        _set("initContainers", 0, "securityContext", to={}),
        _set("containers", 0, "livenessProbe", "httpGet", "host", to="10.0.0.1"),
    ],
)
def test_the_checker_sees_each_breach(built: Built, change: Callable[[Manifest], None]) -> None:
    """A test that could not fail would prove nothing."""
    template = copy.deepcopy(_deployments(built[0][1])[0]["spec"]["template"])
    assert violations_of_restricted(template) == []
    change(template)
    assert violations_of_restricted(template)


@pytest.mark.promise("own-namespace")
def test_every_child_lies_in_the_namespace_of_its_service_and_names_it_as_owner(
    built: Built,
) -> None:
    """No write ever leaves the namespace; the garbage collector finds every child."""
    for service, children in built:
        for child in children:
            metadata = child["metadata"]
            assert metadata["namespace"] == service.namespace
            assert metadata["labels"][LABEL_MANAGED_BY] == MANAGED_BY
            assert metadata["labels"][LABEL_SERVICE] == service.name
            (owner,) = metadata["ownerReferences"]
            assert (owner["uid"], owner["name"]) == (service.uid, service.name)
            assert owner["controller"] is True
            assert owner["blockOwnerDeletion"] is False


@pytest.mark.promise("own-namespace")
def test_no_child_refers_to_another_namespace(built: Built) -> None:
    """All references are local names; only NetworkPolicy peers speak of other namespaces."""
    for service, children in built:
        for child in children:
            if child["kind"] == "NetworkPolicy":
                continue
            for path, value in _values(child):
                assert not path or path[-1] not in {"namespaces", "namespaceSelector"}
                if path and path[-1] == "namespace":
                    assert value == service.namespace


def test_engine_pods_hold_no_token_and_no_more_than_their_volumes(built: Built) -> None:
    """No account, no environment from elsewhere, no host, no model that can be written to."""
    for _, children in built:
        spec = _deployments(children)[0]["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in spec
        for path, _ in _values(spec):
            assert not path or path[-1] not in {"envFrom", "hostPath", "hostPort", "hostNetwork"}
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert len(volumes) == len(spec["volumes"])
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert len(mounts) == len(container["volumeMounts"])
        for mount in mounts.values():
            assert mount["name"] in volumes
            assert "subPath" not in mount
            if mount["name"].startswith("model-"):
                assert mount["readOnly"] is True


def test_the_document_of_any_spec_is_one_that_the_engine_takes(built: Built) -> None:
    """By the published schema, and by the engine's own reader."""
    check = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for _, children in built:
        text = _document(children)
        problems = [error.message for error in check.iter_errors(json.loads(text))]
        assert not problems, (problems, text)
        parse_document(text)
        assert "$(" not in text, "Kubernetes would put a variable there"


def test_the_document_carries_allow_listed_options_alone(built: Built) -> None:
    """Argument safety begins with what is rendered; the command line holds no option at all."""
    seen = set()
    for _, children in built:
        options = json.loads(_document(children))["engine"]["options"]
        assert not option_errors(options)
        seen |= options.keys()
        container = _engine_container(children)
        assert [part.rsplit("/", 1)[-1] for part in container["command"]] == ["fleetkeeper-engine"]
        assert "args" not in container
    # A hundred specs cannot draw as many of the options as five hundred do.
    assert len(seen) > len(ALLOWED) / (2 if len(built) >= SERVICES else 4)


def _variable(name: str, value: str) -> EnvironmentVariable:
    return EnvironmentVariable(name=name, value=value)


def _of_secret(name: str) -> EnvironmentVariable:
    reference = {"secretKeyRef": {"name": "hf", "key": "token"}}
    return EnvironmentVariable.model_validate({"name": name, "valueFrom": reference})


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("options", {"trust-remote-code": "true"}),
        ("options", {"middleware": "evil.Module"}),
        ("options", {"enforce_eager": "true"}),
        ("options", {"seed": "--config=/etc/passwd"}),
        ("options", {"compilation-config.x": "1"}),
        ("env", (_variable("LD_PRELOAD", "/tmp/evil.so"),)),
        ("env", (_variable("PYTHONPATH", "/tmp"),)),
        ("env", (_variable("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),)),
        ("env", (_variable("FLEETKEEPER_ENGINE", "{}"),)),
        ("env", (_of_secret("HF_ENDPOINT"),)),
        ("env", (_of_secret("NCCL_DEBUG"),)),
    ],
)
def test_a_refused_option_or_variable_is_never_rendered(section: str, value: object) -> None:
    """Were the earlier checks passed by, nothing would be built."""
    good = parse_service(service_manifest({"model": {"source": "pvc://m"}}))
    engine = good.spec.engine.model_copy(update={section: value})
    service = replace(good, spec=good.spec.model_copy(update={"engine": engine}))
    with pytest.raises(EngineOptionRefused):
        desired_children(service, CONTEXT.catalog.resolve("cuda"), CONTEXT, replicas=1)


def test_no_empty_value_bears_a_meaning(built: Built) -> None:
    """Digests leave empty values out; only pod templates, which have a hash, may hold some."""
    for _, children in built:
        for child in children:
            bare = copy.deepcopy(child)
            if child["kind"] == "Deployment":
                del bare["spec"]["template"]
            for path, value in _values(bare):
                assert value is not None, path
                assert value not in ({}, []), (child["kind"], path)
                assert (
                    value != "" or "matchLabels" in path or "annotations" in path or "[]" in path
                ), (child["kind"], path)


def test_a_service_is_made_with_one_write_a_child(built: Built) -> None:
    """Eight children with a router, five without, and one status; routers that are many have a budget."""
    for service, children in built:
        routing = service.spec.routing
        of_router = 0 if routing.policy == "None" else 3 + (routing.replicas > 1)
        assert len(children) == 5 + of_router
        keys = {(child["kind"], child["metadata"]["name"]) for child in children}
        assert len(keys) == len(children)
        assert all(len(name) <= 63 for _, name in keys)


def test_building_twice_gives_the_same_text() -> None:
    """The same spec, the same children, to the letter."""
    for service in random_services(seed=5, count=200):
        profile = CONTEXT.catalog.resolve("cuda")
        one, other = (
            json.dumps(desired_children(service, profile, CONTEXT, replicas=1)) for _ in range(2)
        )
        assert one == other
