"""The engine's start-up configuration: a JSON document in the variable FLEETKEEPER_ENGINE.

Its schema is engine_image/schemas/engine-document.schema.json; a test compares both. All values
are written, including defaults, because a changed default of a newer engine must not change a pod.
Tiers and objectives are not part of it: running engines read them from a file of the control
ConfigMap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.profiles.errors import profile_option_errors
from fleetkeeper.api.profiles.profile import EffectiveResources, EngineProfile
from fleetkeeper.api.profiles.simulation import Simulation
from fleetkeeper.api.types import InferenceServiceSpec, Model
from fleetkeeper.api.values.quantity import parse_quantity
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.manifests.common import CONTROL_PORT, SERVING_PORT
from fleetkeeper.reconcile.manifests.model_volumes import location_of
from fleetkeeper.reconcile.manifests.tuning import EngineTuning

DOCUMENT_VARIABLE = "FLEETKEEPER_ENGINE"
KEYS_DIR = "/etc/fleetkeeper/control"
CONTROL_ISSUER = "fleetkeeper"
STALL_S = 60
"""Seconds with pending work and without a step after which an engine counts as hung."""
NOTICE_S = 5
"""Seconds between "not ready" and the end of admission, in which routers detect the change."""


class EngineOptionRefused(ValueError):
    """An engine option, variable or name in the spec that cannot be passed to an engine.

    The planner checks the spec before it builds manifests; this is the last safeguard.
    """


def desired_engine_document(
    service: InferenceService,
    profile: EngineProfile,
    resources: EffectiveResources,
    tuning: EngineTuning,
) -> Manifest:
    """Return the document as a plain dict.

    Raises:
        EngineOptionRefused: an option is not allowed, or an adapter has the model's served name.
    """
    spec = service.spec
    return {
        "contract": profile.contract,
        "accelerator": profile.accelerator.value,
        "model": _model(spec.model, service.name),
        "engine": _engine(spec, profile),
        "memory": {
            "capPercent": tuning.cap(spec),
            "limitBytes": ceil(parse_quantity(resources.memory)),
        },
        "batching": _batching(spec, tuning),
        "health": {
            "stallSeconds": STALL_S,
            "startupSeconds": spec.rollout.startup_seconds,
        },
        "drain": {"seconds": spec.rollout.drain_seconds, "noticeSeconds": NOTICE_S},
        "ports": {"host": "0.0.0.0", "serving": SERVING_PORT, "control": CONTROL_PORT},  # noqa: S104 - a pod serves its network
        "control": {"issuer": CONTROL_ISSUER, "keysDirectory": KEYS_DIR},
        **_tracing(service, profile),
        **_simulation(profile),
    }


def desired_policy(spec: InferenceServiceSpec) -> Manifest:
    """Return the policy that running engines read. A change of it does not change the pods."""
    tiers = spec.tiers
    return {
        "tiers": {
            "realtime": {"queueLimit": tiers.realtime.queue_limit},
            "standard": {"queueLimit": tiers.standard.queue_limit},
            "batch": {
                "queueLimit": tiers.batch.queue_limit,
                "sharePercent": tiers.batch.share_percent,
                "floorPercent": tiers.batch.floor_percent,
            },
        },
        "objectives": {
            "queueWaitMilliseconds": spec.objectives.queue_wait_milliseconds,
            "batchTimeMilliseconds": spec.objectives.batch_time_milliseconds,
        },
    }


def document_text(document: Manifest) -> str:
    """Return the document as one line of JSON with sorted keys: equal documents, equal texts."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _model(model: Model, service_name: str) -> Manifest:
    if any(adapter.name == (model.served_name or service_name) for adapter in model.adapters):
        raise EngineOptionRefused(
            "spec.model.adapters: an adapter has the same name as the served model; "
            "rename it, or set spec.model.servedName"
        )
    written: Manifest = {
        "source": location_of(model.source),
        "servedName": model.served_name or service_name,
        "adapters": [
            {
                "name": adapter.name,
                "path": location_of(adapter.source),
                **({"revision": adapter.revision} if adapter.revision else {}),
            }
            for adapter in model.adapters
        ],
    }
    if model.revision:
        written["revision"] = model.revision
    return written


def _engine(spec: InferenceServiceSpec, profile: EngineProfile) -> Manifest:
    engine = spec.engine
    options = _options(spec, profile)
    written: Manifest = {
        "dtype": engine.dtype.value,
        # A simulated engine is one process, as fast as its hardware says.
        "tensorParallelSize": 1 if profile.simulated else engine.tensor_parallel_size,
        "prefixCaching": engine.prefix_caching,
        "speculativeTokens": int(options.get("spec-tokens", "0")),
        "options": options,
    }
    if engine.quantization is not None:
        written["quantization"] = engine.quantization.value
    if engine.max_model_length is not None:
        written["maxModelLength"] = engine.max_model_length
    if profile.media_domains:
        written["mediaDomains"] = list(profile.media_domains)
    if profile.extra_arguments:
        written["profile"] = {
            "name": profile.name,
            "extraArguments": list(profile.extra_arguments),
        }
    return written


def _tracing(service: InferenceService, profile: EngineProfile) -> Manifest:
    tracing = profile.tracing
    if tracing is None:
        return {}
    written = {
        "endpoint": tracing.endpoint,
        "protocol": tracing.protocol.value,
        "sampleRatio": tracing.sample_ratio,
        "service": service.name,
        "namespace": service.namespace,
    }
    return {"tracing": written}


def _simulation(profile: EngineProfile) -> Manifest:
    if not profile.simulated:
        return {}
    return {"simulation": (profile.simulation or Simulation()).to_manifest()}


def _options(spec: InferenceServiceSpec, profile: EngineProfile) -> dict[str, str]:
    errors = profile_option_errors(spec, profile)
    if errors:
        raise EngineOptionRefused("; ".join(f"{error.path}: {error.message}" for error in errors))
    return dict(spec.engine.options)


def _batching(spec: InferenceServiceSpec, tuning: EngineTuning) -> Manifest:
    """Return the start-up values and minimums. A remedy below a minimum lowers the minimum too."""
    sequences = tuning.sequences(spec)
    return {
        "maxSequences": sequences,
        "minSequences": min(spec.batching.min_sequences, sequences),
        "maxTokens": spec.batching.max_tokens,
        "minTokens": spec.batching.min_tokens,
    }


def model_of(pod_spec: Mapping[str, Any]) -> str:
    """Return the source and the revision of the engine's model, "" if they cannot be read.

    Worked example: `meta-llama/Llama-3.1-8B@0e9e39f`.
    """
    model = _document(pod_spec).get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("source"), str):
        return ""
    return f"{model['source']}@{model.get('revision') or ''}"


def _document(pod_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    for container in _maps(pod_spec.get("containers")):
        for variable in _maps(container.get("env")):
            if variable.get("name") == DOCUMENT_VARIABLE:
                return _parsed(variable.get("value"))
    return {}


def _parsed(value: object) -> Mapping[str, Any]:
    try:
        document = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):  # a live object may hold any text
        return {}
    return document if isinstance(document, Mapping) else {}


def _maps(value: object) -> Sequence[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else ()
