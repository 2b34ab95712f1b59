"""What a tenant may not set: variables that load code or redirect secrets, and system priority."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fleetkeeper.api.parse import InvalidService, parse_service
from fleetkeeper.api.profiles.defaults import default_catalog
from fleetkeeper.api.profiles.environment import HARMLESS, is_administrators
from fleetkeeper.api.profiles.metadata_names import DEFAULT_ALLOWED
from fleetkeeper.api.profiles.metadata_names import is_allowed as allows_name
from fleetkeeper.api.profiles.profile import EngineProfile, ProfileCatalog
from fleetkeeper.api.types import EnvironmentVariable
from fleetkeeper.cli import app
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper.reconcile.planner import decide_plan
from tests.support.reconcile.plan_cluster import settle, step
from tests.support.reconcile.plan_world import World, act, new_world, service, with_spec

LOADS_CODE = (
    "NCCL_NET_PLUGIN",
    "NCCL_TUNER_PLUGIN",
    "NCCL_PROFILER_PLUGIN",
    "NCCL_ENV_PLUGIN",
    "NCCL_CONF_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_DEBUG_FILE",
    "NCCL_TUNER_CONFIG_PATH",
    "VLLM_NCCL_SO_PATH",
    "VLLM_PLUGINS",
    "VLLM_LOGGING_CONFIG_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
)
SENDS_SECRETS = (
    "HF_ENDPOINT",
    "HF_INFERENCE_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "RUNAI_STREAMER_S3_ENDPOINT",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_DIR",
)
REFUSED = (*LOADS_CODE, *SENDS_SECRETS)


def with_env(profile: EngineProfile, *listed: str) -> EngineProfile:
    """The profile with these names allowed, as an administrator may have written them."""
    return profile.model_copy(update={"env": listed})


@pytest.mark.promise("variables-by-name")
@pytest.mark.parametrize("name", REFUSED)
def test_no_profile_lets_a_service_set_what_loads_code_or_redirects_secrets(name: str) -> None:
    """However it is listed: exactly, or by the beginning that profiles of today have."""
    cuda = default_catalog().resolve("cuda")
    begin = name.partition("_")[0]
    for profile in (cuda, with_env(cuda, name), with_env(cuda, f"{begin}_*"), with_env(cuda, "_*")):
        assert not profile.allows_env(name)


@pytest.mark.parametrize("name", REFUSED)
def test_the_service_is_refused_with_the_field_and_who_may_set_it(name: str) -> None:
    with pytest.raises(InvalidService) as problem:
        parse_service(service(engine={"env": [{"name": name, "value": "x"}]}))
    (error,) = problem.value.errors
    assert error.path == "spec.engine.env[0].name"
    assert "can only be set by the administrator" in error.message


@given(st.from_regex(r"[A-Z][A-Z0-9_]{0,40}", fullmatch=True))
def test_a_beginning_allows_known_names_alone(ending: str) -> None:
    """NCCL grows with every release; what is not known to be harmless is refused."""
    cuda = default_catalog().resolve("cuda")
    assert cuda.allows_env(f"NCCL_{ending}") == (f"NCCL_{ending}" in HARMLESS)


def test_no_harmless_name_is_one_of_the_administrators() -> None:
    assert [name for name in sorted(HARMLESS) if is_administrators(name)] == []
    assert {"NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "VLLM_LOGGING_LEVEL"} <= HARMLESS


def test_tuning_goes_on_being_allowed() -> None:
    cuda = default_catalog().resolve("cuda")
    asked = ("NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "HTTPS_PROXY", "NO_PROXY")
    assert all(map(cuda.allows_env, asked))
    assert with_env(cuda, "VLLM_ENFORCE_STRICT_TOOL_CALLING").allows_env(
        "VLLM_ENFORCE_STRICT_TOOL_CALLING"
    )


@pytest.mark.promise("variables-from-secrets")
def test_only_a_name_that_is_listed_exactly_comes_from_a_secret() -> None:
    """A value that vLLM or NCCL cannot read ends up in a log, and so does VLLM_LOGGING_PREFIX."""
    cuda = default_catalog().resolve("cuda")

    def allows(profile: EngineProfile, name: str) -> bool:
        return profile.allows_variable(
            EnvironmentVariable.model_validate(
                {"name": name, "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
            )
        )

    assert allows(cuda, "HTTPS_PROXY")
    assert not allows(cuda, "NCCL_DEBUG")
    assert not allows(with_env(cuda, "VLLM_*"), "VLLM_LOGGING_PREFIX")
    assert allows(with_env(cuda, "AWS_SECRET_ACCESS_KEY"), "AWS_SECRET_ACCESS_KEY")
    assert not any(allows(with_env(cuda, name), name) for name in REFUSED)


def own_hub() -> ProfileCatalog:
    """The default profiles, whose engines download from a hub of the installation's own."""
    catalog = default_catalog()
    variables = {"HF_ENDPOINT": "https://hub.example.com", "HTTPS_PROXY": "http://proxy:3128"}
    return ProfileCatalog.model_validate(
        {
            "profiles": [
                {**item.model_dump(by_alias=True, exclude_none=True), "variables": variables}
                for item in catalog.profiles
            ],
            "aliases": dict(catalog.aliases),
        }
    )


@pytest.mark.promise("endpoints")
def test_an_endpoint_of_the_profile_reaches_the_engine_and_no_service_changes_it() -> None:
    context = replace(default_context(), catalog=own_hub())
    profile = context.catalog.resolve("cuda")
    template = desired_engine_template(parse_service(service()), profile, context)
    env = {item["name"]: item.get("value") for item in _containers(template)[0]["env"]}
    assert env["HF_ENDPOINT"] == "https://hub.example.com"
    assert not profile.allows_env("HTTPS_PROXY")


def _containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = template["spec"]["containers"]
    return found


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {"env": [{"name": "HF_ENDPOINT", "value": "https://evil.example.com"}]}},
        {"engine": {"env": [{"name": "NCCL_NET_PLUGIN", "value": "/models/evil.so"}]}},
        {"placement": {"priorityClassName": "system-node-critical"}},
        {"serviceAccountName": "model-reader"},
        {"podMetadata": {"annotations": {"sidecar.istio.io/inject": "true"}}},
        {
            "podMetadata": {
                "annotations": {
                    "container.apparmor.security.beta.kubernetes.io/engine": "unconfined"
                }
            }
        },
        {"routing": {"placement": {"priorityClassName": "system-node-critical"}}},
    ],
)
def test_a_service_that_ran_with_it_before_keeps_its_pods_and_says_why(
    spec: dict[str, Any],
) -> None:
    """The upgrade refuses the spec; it deletes, scales and restarts nothing."""
    world = settle(new_world())
    running, deployment = world.pods, world.engine
    assert running
    world = with_spec(world, **spec)
    plan = decide_plan(world.snapshot(), world.context, world.now)
    assert plan.actions == ()
    world = step(act(world, plan), 60.0)
    assert world.condition("Stalled") == ("True", "InvalidSpec")
    assert {pod.uid for pod in world.pods} == {pod.uid for pod in running}
    assert world.engine.template_hash == deployment.template_hash


@pytest.mark.promise("system-priority")
@pytest.mark.parametrize("of", ["engines", "routers"])
def test_system_priority_is_the_administrators_to_allow(of: str) -> None:
    placement = {"placement": {"priorityClassName": "system-cluster-critical"}}
    asked = service(**(placement if of == "engines" else {"routing": placement}))
    refused = decide_plan(World(asked).snapshot(), default_context(), 0.0)
    assert refused.actions == ()
    assert "systemPriorityClasses" in str(refused.status)
    allowed = replace(default_context(), system_priority_classes=True)
    assert decide_plan(World(asked).snapshot(), allowed, 0.0).actions
    common = service(placement={"priorityClassName": "serving"})
    assert decide_plan(World(common).snapshot(), default_context(), 0.0).actions


@pytest.mark.promise("service-accounts")
@pytest.mark.parametrize(
    ("allowed", "name", "is_allowed"),
    [
        ((), "model-reader", False),
        ((), "default", False),
        (("model-reader",), "model-reader", True),
        (("model-reader",), "model-reader-2", False),
        (("model-*",), "model-reader", True),
        (("model-*",), "my-model-reader", False),
        (("other", "*"), "model-reader", True),
    ],
)
def test_a_service_account_is_the_administrators_to_allow(
    allowed: tuple[str, ...], name: str, is_allowed: bool
) -> None:
    asked = service(serviceAccountName=name)
    context = replace(default_context(), engine_service_accounts=allowed)
    plan = decide_plan(World(asked).snapshot(), context, 0.0)
    assert bool(plan.actions) == is_allowed
    assert ("engineServiceAccounts" in str(plan.status)) != is_allowed
    assert ("InvalidSpec" in str(plan.status)) != is_allowed


@pytest.mark.promise("pod-metadata")
@pytest.mark.parametrize(
    ("allowed", "name", "is_allowed"),
    [
        ((), "team", True),
        ((), "app.kubernetes.io/part-of", True),
        ((), "cluster-autoscaler.kubernetes.io/safe-to-evict", True),
        ((), "kueue.x-k8s.io/queue-name", False),
        (DEFAULT_ALLOWED, "kueue.x-k8s.io/queue-name", True),
        (DEFAULT_ALLOWED, "kueue.x-k8s.io/priority-class", False),
        (DEFAULT_ALLOWED, "karpenter.sh/do-not-disrupt", True),
        ((), "sidecar.istio.io/inject", False),
        (("sidecar.istio.io/inject",), "sidecar.istio.io/inject", True),
        (("sidecar.istio.io/inject",), "sidecar.istio.io/injectx", False),
        (("example.com/*",), "example.com/cost", True),
        (("example.com/*",), "evil.example.com/cost", False),
        ((), "io.katacontainers.config.agent.policy", False),
        (("*",), "io.katacontainers.config.agent.policy", True),
    ],
)
def test_a_label_or_annotation_is_the_administrators_to_allow(
    allowed: tuple[str, ...], name: str, is_allowed: bool
) -> None:
    asked = service(podMetadata={"annotations": {name: "x"}})
    context = replace(default_context(), pod_metadata_names=allowed)
    plan = decide_plan(World(asked).snapshot(), context, 0.0)
    assert bool(plan.actions) == is_allowed
    assert ("podMetadataNames" in str(plan.status)) != is_allowed
    assert ("InvalidSpec" in str(plan.status)) != is_allowed


def test_no_setting_opens_the_names_of_kubernetes() -> None:
    """Not even `*`, and the schema refuses them too."""
    for name in ("a.kubernetes.io/x", "kubernetes.io/x", "k8s.io/x", "io.kubernetes.cri-o.Devices"):
        assert not allows_name(name, ("*",))
        with pytest.raises(InvalidService, match="instructions"):
            parse_service(service(podMetadata={"labels": {name: "x"}}))


@pytest.mark.promise("service-accounts")
def test_an_engine_with_a_service_account_has_no_token() -> None:
    asked = parse_service(service(serviceAccountName="model-reader"))
    pod = desired_engine_template(asked, default_catalog().resolve("cuda"), default_context())
    assert pod["spec"]["serviceAccountName"] == "model-reader"
    assert pod["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "  engine: {env: [{name: NCCL_NET_PLUGIN, value: /m/x.so}]}\n",
            "spec.engine.env[0].name: ",
        ),
        (
            "  engine: {env: [{name: HF_ENDPOINT, value: 'https://x'}]}\n",
            "spec.engine.env[0].name: ",
        ),
        (
            "  engine: {env: [{name: NCCL_NEW_THING, value: '1'}]}\n",
            "spec.engine.env[0].name: NCCL_NEW_THING is not",
        ),
        ("  placement: {priorityClassName: system-node-critical}\n", "systemPriorityClasses"),
        (
            "  podMetadata: {annotations: {vault.hashicorp.com/agent-inject: 'true'}}\n",
            "podMetadataNames",
        ),
        (
            "  podMetadata: {annotations: {kubernetes.io/egress-bandwidth: 1M}}\n",
            "spec.podMetadata.annotations",
        ),
        ("  serviceAccountName: reader\n", "spec.serviceAccountName: reader is not"),
        (
            "  routing: {placement: {priorityClassName: system-node-critical}}\n",
            "spec.routing.placement.priorityClassName",
        ),
    ],
)
def test_check_says_so_before_anything_is_applied(tmp_path: Path, lines: str, words: str) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(
        "apiVersion: fleetkeeper.io/v1alpha1\nkind: InferenceService\nmetadata: {name: chat}\n"
        f"spec:\n  model: {{source: pvc://models/x}}\n{lines}"
    )
    done = CliRunner().invoke(app, ["check", "-f", str(file)])
    assert done.exit_code != 0
    assert words in done.output
