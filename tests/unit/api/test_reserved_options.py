"""The table of reserved vLLM options: its views, and that they fit what the operator renders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from fleetkeeper.api.options import ALLOWED
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper_contract.extra_arguments import argument_errors, option_of
from fleetkeeper_contract.vllm_options import RESERVED, Setter, refused
from fleetkeeper_engine.spec import Engine, EngineDocument, parse_document
from fleetkeeper_engine.supervisor.launch.argv import desired_argv
from tests.support.reconcile.golden_services import CASES
from tests.unit.engine.test_argv import LAUNCH, PLAN

REFUSED_TO_BOTH = """
    api-key api-server-count config data-parallel- data-parallel-size device-ids device-memory-utilization
    disable-access-log-for-endpoints disable-log-stats distributed-executor-backend download-dir dtype
    enable-cumem-allocator enable-elastic-ep enable-lora enable-prefix-caching enable-sleep-mode
    enable-ssl-refresh gpu-memory-utilization grpc grpc-port headless help hf-token host
    kv-cache-memory-bytes long-prefill-token-threshold long-prefill-token-threshold-adaptive
    lora-modules master-addr master-port max-model-len max-num-active-seqs max-num-batched-tokens
    max-num-queued-reqs max-num-queued-tokens max-num-scheduled-tokens max-num-seqs middleware model
    nnodes node-rank num-gpu-blocks-override pipeline-parallel-size port
    prefill-context-parallel-size quantization revision root-path scheduler-cls scheduling-policy
    served-model-name shutdown-timeout spec- speculative-config ssl- tensor-parallel-size
    trust-remote-code uds worker-cls worker-extension-cls
"""
REFUSED_TO_PROFILES = {"max-lora-rank", "max-loras", "spec-method", "spec-tokens"}
REFUSED_TO_SERVICES = """
    allowed-local-media-path allowed-media-domains chat-template hf-overrides kv-events-config
    kv-transfer-config logits-processors model-impl otlp-traces-endpoint reasoning-parser-plugin
    tokenizer tool-parser-plugin
"""


@pytest.mark.parametrize(
    ("setter", "names"),
    [
        (Setter.PROFILE, {*REFUSED_TO_BOTH.split(), *REFUSED_TO_PROFILES}),
        (Setter.SERVICE, {*REFUSED_TO_BOTH.split(), *REFUSED_TO_SERVICES.split()}),
    ],
)
def test_a_view_changes_only_on_purpose(setter: Setter, names: set[str]) -> None:
    """A removed name opens an option. A new one must not refuse a profile that works today."""
    assert {name for name, row in RESERVED.items() if setter not in row.setters} == names


def test_services_may_set_a_reserved_option_only_if_it_is_on_their_list() -> None:
    """The list of services and the engine's view must agree on every name."""
    both = {name for name, row in RESERVED.items() if Setter.SERVICE in row.setters}
    assert both == ALLOWED.keys() & RESERVED.keys() == {*REFUSED_TO_PROFILES, "reasoning-parser"}
    assert [name for name in ALLOWED if refused(name, Setter.SERVICE)] == []


def golden_documents() -> Iterator[EngineDocument]:
    for case in CASES.values():
        service, catalog = case.service(), case.context.catalog
        profile = catalog.resolve(service.spec.engine.profile)
        template = desired_engine_template(service, profile, case.context, case.tuning)
        variables = template["spec"]["containers"][0]["env"]
        yield parse_document(
            next(item["value"] for item in variables if item["name"] == "FLEETKEEPER_ENGINE")
        )


def test_what_the_operator_renders_for_golden_services_passes_the_engine() -> None:
    documents = list(golden_documents())
    assert len(documents) == len(CASES) > 40
    names = {name for document in documents for name in document.engine.options}
    assert names >= {"enforce-eager", "kv-cache-dtype", "spec-method", "spec-tokens"}
    fields = {item for document in documents for item in document.engine.model_fields_set}
    assert fields >= {"quantization", "max_model_length", "tensor_parallel_size"}


def test_neither_services_nor_profiles_set_what_the_supervisor_sets() -> None:
    """Except options that they share with it on purpose."""
    plan = replace(PLAN, gpu_memory_utilization=0.5)
    launch = replace(LAUNCH, adapters={"sql": "/a"})
    shared, seen = {"otlp-traces-endpoint", "allowed-media-domains"}, set()
    for document in golden_documents():
        for argument in desired_argv(document, plan, launch)[3:]:
            name = option_of(argument)
            if name and name not in document.engine.options:
                assert name in ALLOWED or refused(name, Setter.SERVICE), argument
                assert name in shared or argument_errors([argument]), argument
                seen.add(name)
    assert seen >= {*shared, "max-loras", "kv-cache-memory-bytes", "quantization", "scheduler-cls"}


@given(
    name=st.sampled_from((REFUSED_TO_BOTH + REFUSED_TO_SERVICES).split()),
    cut=st.integers(2, 60),
    negated=st.booleans(),
)
def test_the_engine_refuses_services_every_spelling_of_a_reserved_option(
    name: str, cut: int, negated: bool
) -> None:
    """The document's names have no `_`, `.` or `=`, so abbreviations and `no-` are what is left."""
    short = name[:cut]
    assume(short not in ALLOWED)
    with pytest.raises(ValidationError, match="is not settable"):
        Engine.model_validate({"options": {f"no-{short}" if negated else short: "true"}})


@pytest.mark.parametrize(
    "spelled",
    ["num_gpu_blocks_override", "Host", "-tp", "--host", "speculative-config.method", "host=::", "host "],
)  # fmt: skip
def test_the_engine_refuses_services_other_forms_of_a_name(spelled: str) -> None:
    with pytest.raises(ValidationError, match="options"):
        Engine.model_validate({"options": {spelled: "1"}})
