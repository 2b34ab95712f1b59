"""Conversion of the spec to the control loop's settings and units, with remedies applied."""

from __future__ import annotations

from fleetkeeper.api.types import AccessMode, BreakerMode, InferenceServiceSpec
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.activation import activation_of
from fleetkeeper.common.sleep import NEVER_SLEPT, Sleep
from fleetkeeper_contract.sleep import SleepState


def settings_of(
    spec: InferenceServiceSpec,
    generation: int,
    *,
    max_sequences: int | None = None,
    cap_percent: int | None = None,
    resumed: int | None = None,
    sleep: Sleep = NEVER_SLEPT,
) -> ControlSettings:
    """Return the settings. `max_sequences`, `cap_percent`: those of a remedy in force; None: the spec's.

    `resumed`: the replicas to which a service returns after spec.suspend; None: it has them already. `sleep`: that of the status.
    """
    scaling, objectives, batching = spec.scaling, spec.objectives, spec.batching
    most = batching.max_sequences if max_sequences is None else max_sequences
    return ControlSettings(
        min_replicas=scaling.min_replicas,
        max_replicas=max(scaling.min_replicas, scaling.max_replicas),
        activation=activation_of(spec, resumed, is_asleep=sleep.is_asleep),
        scaling_mode=scaling.mode,
        scale_down_delay_s=float(scaling.scale_down_delay_seconds),
        queue_wait_objective_s=objectives.queue_wait_milliseconds / 1e3,
        batch_time_objective_s=objectives.batch_time_milliseconds / 1e3,
        attainment_ratio=objectives.attainment_percent / 100,
        batching_mode=batching.mode,
        min_sequences=min(batching.min_sequences, most),
        max_sequences=most,
        min_tokens=min(batching.min_tokens, batching.max_tokens),
        max_tokens=batching.max_tokens,
        batch_share_ratio=spec.tiers.batch.share_percent / 100,
        batch_floor_ratio=spec.tiers.batch.floor_percent / 100,
        breakers_act=spec.breaker.mode is BreakerMode.AUTO,
        fallback_replicas=spec.breaker.fallback_replicas,
        cap_percent=spec.memory.cap_percent if cap_percent is None else cap_percent,
        restart_fragmented=spec.memory.restart_fragmented,
        paused=spec.paused,
        sleep_after_s=_sleep_after_s(spec),
        goes_to_sleep=sleep.state is SleepState.GOING_TO_SLEEP,
        waking_tier=sleep.tier if sleep.is_waking else None,
        waking_since=sleep.since if sleep.is_waking else None,
        wake_has_failed=sleep.is_waking and sleep.failures > 0,
        awake_since=sleep.since if sleep.state is None else None,
        min_awake_s=float(spec.scaling.sleep.min_awake_seconds) if spec.scaling.sleep else 0.0,
        demands_grants=spec.access is AccessMode.GATEWAY,
        generation=generation,
    )


def _sleep_after_s(spec: InferenceServiceSpec) -> float | None:
    """Return the idle time. A service whose pods others than the gateway call never sleeps."""
    settings = spec.scaling.sleep
    if settings is None or spec.access is not AccessMode.GATEWAY:
        return None
    return float(settings.after_idle_seconds)
