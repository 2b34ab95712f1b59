"""The module that starts vLLM's server: vLLM's own, or ours, which forks vLLM's processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fleetkeeper_engine.in_vllm.settings import FORKING_SERVER
from fleetkeeper_engine.spec import Accelerator, EngineDocument
from fleetkeeper_engine.supervisor.launch.features import Features
from fleetkeeper_engine.supervisor.launch.object_storage import is_object_storage

FORKED_VERSIONS = ("0.32.0",)
"""The versions of vLLM for CPU whose starts, ends and answers were tested with forked processes."""
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def decided_entry(
    document: EngineDocument, features: Features, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Return the module, and why vLLM's processes are spawned; "" if they are forked or CUDA decides."""
    if document.accelerator is not Accelerator.CPU:
        return features.entry, ""
    reason = _why_spawned(document, features, environment)
    return (features.entry if reason else FORKING_SERVER), reason


def _why_spawned(
    document: EngineDocument, features: Features, environment: Mapping[str, str]
) -> str:
    engine, version = document.engine, features.vllm_version
    method, binding = environment.get(METHOD, "fork"), environment.get(BINDING, "nobind")
    options = {*engine.options, *(engine.profile.options if engine.profile else ())}
    reasons = {
        f"vLLM {version} was not tested with forked ones": version not in FORKED_VERSIONS,
        f"{METHOD} is {method}": method != "fork",
        # The threads of a forked worker exist before it could bind them.
        f"{BINDING} is {binding}": binding != "nobind",
        "numa-bind starts them by another program": "numa-bind" in options,
        # The API server exports spans from threads before it starts EngineCore.
        "tracing is on": document.tracing is not None,
        "threads read the model from object storage": is_object_storage(document.model.source),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
