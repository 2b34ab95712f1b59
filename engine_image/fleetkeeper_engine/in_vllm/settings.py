"""What the supervisor tells its code inside vLLM's processes: one JSON object in the environment.

The page carries what changes while the engine runs; this carries what does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

ENVIRONMENT = "FLEETKEEPER_INSIDE"
INTERNAL_HEADER = "x-fleetkeeper-internal"
"""Carries `internal_token`: the supervisor's own requests skip queue, tiers and counting."""

SCHEDULER_FACTORY = "fleetkeeper_engine.in_vllm.scheduler.live_scheduler"
"""Value of vLLM's --scheduler-cls."""
MIDDLEWARE = "fleetkeeper_engine.in_vllm.http.middleware.TierMiddleware"
"""Value of vLLM's --middleware."""


@dataclass(frozen=True, slots=True)
class InsideSettings:
    """Start-up values. Every default is what an engine without a document gets."""

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
    """The pod's own rule closes batch while the oldest wait of another tier is above it."""
    standard_offset_s: float = 0.0
    batch_ageing_s: float = 30.0
    """A batch request is treated like a standard one that arrived so much later."""
    cap_percent: int = 80
    """Of the accelerator's memory; for the allocator's cap on CUDA."""
    internal_token: str = ""
    """Empty: no request counts as the supervisor's own."""

    def to_json(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> InsideSettings:
        """The settings of this pod; the defaults without any.

        Raises:
            ValueError: when the variable holds no such object. It is written by our own supervisor,
                so this tells of two versions of the package in one pod.
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
