"""Start-up settings of our code in vLLM's processes: one JSON object in the environment.

Shared memory carries what changes while the engine runs. These settings do not change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from fleetkeeper_engine.policy import Policy

ENVIRONMENT = "FLEETKEEPER_VLLM_SETTINGS"
INTERNAL_HEADER = "x-fleetkeeper-internal"
"""Carries `internal_token`: the supervisor's own requests skip queue, tiers and counting."""

SCHEDULER_FACTORY = "fleetkeeper_engine.in_vllm.scheduler.live_scheduler"
"""Value of vLLM's --scheduler-cls."""
MIDDLEWARE = "fleetkeeper_engine.in_vllm.http.middleware.TierMiddleware"
"""Value of vLLM's --middleware."""
TRACED_MIDDLEWARE = "fleetkeeper_engine.in_vllm.http.tracing.TracedTierMiddleware"
"""Value of vLLM's --middleware if the document has `tracing`."""
FORKING_SERVER = "fleetkeeper_engine.in_vllm.api_server"
"""The module that starts vLLM's server with processes that are forked."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Start-up values. The defaults apply to an engine without a document."""

    max_sequences: int = 256
    """The ceiling of the live limit: vLLM's --max-num-seqs."""
    min_sequences: int = 1
    max_tokens: int = 8192
    """The ceiling of the live limit: vLLM's --max-num-batched-tokens."""
    min_tokens: int = 256
    realtime_queue_limit: int = 64
    standard_queue_limit: int = 256
    batch_queue_limit: int = 1024
    batch_share_percent: int = 30
    batch_floor_percent: int = 5
    queue_wait_objective_s: float = 0.5
    """The pod's own rule closes batch while the oldest wait of another tier is above this."""
    standard_offset_s: float = 0.0
    batch_ageing_s: float = 30.0
    """A batch request is treated like a standard request that arrived this much later."""
    cap_percent: int = 80
    """Memory cap as a share of the accelerator's memory, for the allocator on CUDA."""
    internal_token: str = ""
    """If it is empty, no request counts as the supervisor's own."""

    grants_file: str = ""
    """File that says whether grants are demanded. If it is empty, none are."""

    def policy(self) -> Policy:
        """Return the admission policy until the supervisor sets one."""
        return Policy(
            queue_limits=(
                self.realtime_queue_limit,
                self.standard_queue_limit,
                self.batch_queue_limit,
            ),
            batch_share_ratio=self.batch_share_percent / 100,
            batch_floor_ratio=self.batch_floor_percent / 100,
            queue_wait_objective_s=self.queue_wait_objective_s,
        )

    def to_json(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> VllmSettings:
        """Return the settings of this pod, or the defaults if the variable is not set.

        Raises:
            ValueError: if the variable holds no such object. Our own supervisor writes it, so the
                likely cause is two versions of the package in one pod.
        """
        text = environment.get(ENVIRONMENT)
        if not text:
            return cls()
        known = {field.name for field in fields(cls)}
        values = json.loads(text)
        if not isinstance(values, dict) or not values.keys() <= known:
            raise ValueError(
                f"{ENVIRONMENT} must be an object with the fields {', '.join(sorted(known))}; "
                "is another version of fleetkeeper_engine on the path?"
            )
        return cls(**values)
