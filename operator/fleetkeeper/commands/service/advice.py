"""Notes of `fleetkeeper check` on settings that are valid but often surprise users."""

from __future__ import annotations

import re
from typing import Final

from fleetkeeper.api.options import version_of
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.schema.object_storage_rules import is_object_source
from fleetkeeper.api.types import (
    AccessMode,
    InferenceServiceSpec,
    NetworkPreset,
    Routing,
    RoutingPolicy,
    ScalingMode,
    ServiceType,
)
from fleetkeeper.api.values.int_or_percent import is_zero
from fleetkeeper.api.values.quantity import parse_quantity
from fleetkeeper.commands.service.device_advice import device_advice
from fleetkeeper.commands.service.needs import Needs
from fleetkeeper.reconcile.context import MODEL_HUB, PlanContext
from fleetkeeper.reconcile.manifests.model_volumes import downloads

ENCODINGS_HOST = "openaipublic.blob.core.windows.net"
ENCODINGS_INCLUDED_SINCE = (0, 31)
"""The first version of vLLM whose library for gpt-oss (oss-harmony) contains the encoding."""
MIN_ROUTER_BYTES: Final = 128 * 1024**2


def advice_of(service: InferenceService, needs: Needs, context: PlanContext) -> list[str]:
    """Return notes on settings that are valid but often surprise users."""
    spec, profile = service.spec, needs.profile
    if profile.simulated:
        advice = _simulated_advice(profile)
    else:
        advice = _model_advice(spec) + _start_advice(spec, profile, context)
        advice += device_advice(spec, needs)
    if spec.suspend:
        advice.append("suspend is true: the service runs no replica until it is false")
    if is_zero(spec.disruption.max_unavailable):
        advice.append("disruption.maxUnavailable is 0: node drains are blocked")
    if spec.replicas is not None and spec.scaling.mode is not ScalingMode.EXTERNAL:
        advice.append(
            f"replicas is {spec.replicas}: Fleetkeeper adjusts only batch limits and does not scale"
        )
    if spec.scaling.mode is ScalingMode.AUTO and spec.scaling.min_replicas == 1:
        advice.append(
            "scaling.minReplicas is 1: the service is unavailable while its only replica restarts"
        )
    if spec.scaling.sleep is not None:
        advice += _sleep_advice(spec)
    advice += _network_advice(spec)
    if spec.routing.policy is not RoutingPolicy.NONE:
        advice += _router_advice(spec.routing)
    return advice


def _sleep_advice(spec: InferenceServiceSpec) -> list[str]:
    """Return what keeps a service from ever going to sleep."""
    advice, never = [], "scaling.sleep is set, but the service never goes to sleep:"
    if spec.access is not AccessMode.GATEWAY:
        advice.append(
            f"{never} access is {spec.access}, and only the gateway wakes a service; set access: Gateway"
        )
    if spec.scaling.mode is not ScalingMode.AUTO:
        advice.append(f"{never} scaling.mode is {spec.scaling.mode}; set scaling.mode: Auto")
    if spec.replicas is not None:
        advice.append(f"{never} replicas is {spec.replicas}; remove it")
    return advice


def _router_advice(routing: Routing) -> list[str]:
    advice = []
    if routing.replicas == 1:
        advice.append(
            "routing.replicas is 1: the service is unavailable while its only router pod is replaced"
        )
    memory = routing.resources.memory
    if memory is not None and parse_quantity(memory) < MIN_ROUTER_BYTES:
        advice.append(
            f"routing.resources.memory is {memory}: a router without requests takes 70 MiB, and refuses requests near its limit; use at least 128Mi"
        )
    return advice


def _simulated_advice(profile: EngineProfile) -> list[str]:
    return [
        f"the engine profile {profile.name} is simulated: no model answers; model, accelerators and claims of the service are not used; the chart needs simulatedEngines: true"
    ]


def _model_advice(spec: InferenceServiceSpec) -> list[str]:
    advice = []
    if spec.model.source.startswith("hf://") and spec.model.cache is None:
        advice.append("model.cache is not set: every new pod downloads the model again")
    if is_object_source(spec.model.source):
        advice.append(
            "model.source is s3://: new pods load what is at the prefix when they start; use a new prefix for each version"
        )
    sources = (spec.model.source, *(adapter.source for adapter in spec.model.adapters))
    if any(source.startswith("oci://") for source in sources):
        advice.append(
            "oci:// needs image volumes: Kubernetes 1.35, or 1.33 with the feature gate ImageVolume, and containerd 2.1 or CRI-O 1.31"
        )
    return advice


def _start_advice(
    spec: InferenceServiceSpec, profile: EngineProfile, context: PlanContext
) -> list[str]:
    """Return notes on what ends engines at their start with some models."""
    advice = []
    is_chunked = spec.engine.options.get("enable-chunked-prefill") != "false"
    if not is_chunked and spec.engine.max_model_length is None:
        advice.append(
            f"enable-chunked-prefill is false, but engine.maxModelLength is not set: engines start only if the model's own length is at most batching.maxTokens ({spec.batching.max_tokens})"
        )
    if _is_gpt_oss(spec) and not _reaches_encodings(spec, profile, context):
        advice.append(
            f"with vLLM {profile.vllm_version}, gpt-oss models read their encoding from {ENCODINGS_HOST}, which the engine pods cannot reach: allow it with egress in the engine profile, or set TIKTOKEN_ENCODINGS_BASE in its variables to a directory with the encoding"
        )
    return advice


def _is_gpt_oss(spec: InferenceServiceSpec) -> bool:
    named = f"{spec.model.source} {spec.model.served_name or ''}".lower()
    parser = spec.engine.options.get("reasoning-parser")
    return re.search("gpt[-_]?oss", named) is not None or parser == "openai_gptoss"


def _reaches_encodings(
    spec: InferenceServiceSpec, profile: EngineProfile, context: PlanContext
) -> bool:
    """Return True if pods may connect to the encodings' host, or have a copy."""
    has_own = version_of(profile.vllm_version) >= ENCODINGS_INCLUDED_SINCE
    is_public = context.model_hub_rule == MODEL_HUB and downloads(spec.model)
    has_copy = profile.sets_variable("TIKTOKEN_ENCODINGS_BASE")
    return has_own or is_public or has_copy or bool(profile.egress)


def _network_advice(spec: InferenceServiceSpec) -> list[str]:
    policy, advice = spec.network_policy, []
    if spec.service.type is not ServiceType.CLUSTER_IP and not policy.cidrs:
        advice.append(
            f"service.type is {spec.service.type}, but networkPolicy.cidrs is empty: a network that enforces policies lets no client outside the cluster connect"
        )
    if spec.access is AccessMode.GATEWAY and policy.preset is not NetworkPreset.GATEWAY:
        advice.append(
            f"access is Gateway, but networkPolicy.preset is {policy.preset}: other pods can connect, and only the engines refuse them"
        )
    return advice
