"""A service as the simulator plays it: settings of the control loop, engines, replicas. From spec and hardware."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from fleetkeeper.api.profiles.simulation import Simulation
from fleetkeeper.api.schema.error_messages import FieldError
from fleetkeeper.api.types import (
    BatchingMode,
    InferenceServiceSpec,
    RoutingPolicy,
    ScalingMode,
)
from fleetkeeper.autoscale.settings import settings_of
from fleetkeeper.autoscale.signals.series_map import edges_of
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.simulate.cluster import ColdStart
from fleetkeeper.simulate.engine import EngineSpec
from fleetkeeper_steps.hardware import Hardware, floor_s, known_hardware

COLD_START_SIGMA = 0.25
COLD_START_TAIL_RATIO = 0.1
COLD_START_TAIL_FACTOR = 3.0
"""Starts of vLLM pods with cached image and weights: lognormal, and one in ten takes three times as long."""


class UnfitService(ValueError):
    """A valid service that cannot be simulated. `error` names the field, the reason and the correction."""

    def __init__(self, error: FieldError) -> None:
        super().__init__(str(error))
        self.error = error


SIMULATED_START_S: Final = 5.0
"""Time from the creation of a simulated engine's pod until it is ready, beside `startSeconds`."""


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """The parameters of a service that a simulation needs."""

    settings: ControlSettings
    engine: EngineSpec
    cold_start: ColdStart
    gpus: int
    """Accelerators of a replica."""
    routers: int
    """Number of router pods."""
    drain_s: float
    notes: tuple[str, ...] = ()
    """Notes for the user."""


def engine_spec(hardware: Hardware, spec: InferenceServiceSpec) -> EngineSpec:
    """Return the simulated engine of a service on this hardware."""
    tiers = spec.tiers
    return EngineSpec(
        hardware.costs,
        kv_capacity_tokens=hardware.kv_capacity_tokens,
        max_sequences=spec.batching.max_sequences,
        max_tokens=spec.batching.max_tokens,
        queue_wait_objective_s=spec.objectives.queue_wait_milliseconds / 1e3,
        batch_time_objective_s=spec.objectives.batch_time_milliseconds / 1e3,
        queue_limits=(
            tiers.realtime.queue_limit,
            tiers.standard.queue_limit,
            tiers.batch.queue_limit,
        ),
        batch_share_ratio=tiers.batch.share_percent / 100,
    )


def simulated_hardware(simulation: Simulation) -> Hardware:
    """Return the hardware that engines of a simulated profile simulate, with its speed."""
    known = known_hardware()[simulation.hardware]
    costs, stages, speed = simulation.costs, simulation.start_seconds, simulation.speed
    if costs is not None:
        known = replace(
            known,
            t0_s=costs.t0_seconds,
            w_s=costs.w_seconds,
            g_s=costs.g_seconds,
            b_s=costs.b_seconds,
            c_s=costs.c_seconds,
            q_s=costs.q_seconds,
            kernel_ratio=1.0,
            step_overhead_s=0.0,
            sequence_overhead_s=0.0,
            request_overhead_s=costs.request_seconds,
        )
    return replace(
        known,
        kernel_ratio=known.kernel_ratio / speed,
        step_overhead_s=known.step_overhead_s / speed,
        sequence_overhead_s=known.sequence_overhead_s / speed,
        request_overhead_s=known.request_overhead_s / speed,
        kv_capacity_tokens=simulation.kv_capacity_tokens or known.kv_capacity_tokens,
        cold_start_s=SIMULATED_START_S + stages.weights + stages.load + stages.warm_up,
    )


def model_of(
    spec: InferenceServiceSpec, generation: int, hardware: Hardware, gpus: int
) -> ServiceModel:
    """Return the model of a service whose replicas have `gpus` accelerators.

    Raises:
        UnfitService: the replicas are pinned, the model does not fit the hardware, or no batch size
            reaches the objectives.
    """
    settings = settings_of(spec, generation)
    for error in _errors(spec, settings, hardware, gpus):
        raise UnfitService(error)
    return ServiceModel(
        settings=settings,
        engine=engine_spec(hardware, spec),
        cold_start=ColdStart(
            hardware.cold_start_s,
            COLD_START_SIGMA,
            COLD_START_TAIL_RATIO,
            COLD_START_TAIL_FACTOR,
        ),
        gpus=gpus,
        routers=spec.routing.replicas,
        drain_s=float(spec.rollout.drain_seconds),
        notes=tuple(_notes(spec)),
    )


def advisory_settings(settings: ControlSettings, max_tokens: int) -> ControlSettings:
    """Return the settings with which the control loop computes and applies nothing."""
    return replace(
        settings,
        scaling_mode=ScalingMode.ADVISORY,
        batching_mode=BatchingMode.ADVISORY,
        max_tokens=max_tokens,
        min_tokens=min(settings.min_tokens, max_tokens),
    )


def _errors(
    spec: InferenceServiceSpec, settings: ControlSettings, hardware: Hardware, gpus: int
) -> list[FieldError]:
    errors = []
    where = f"{hardware.model} on {hardware.name}"
    if spec.suspend:
        text = "is true, so the service has no replicas to simulate; set it to false"
        errors.append(FieldError("spec.suspend", text))
    if spec.replicas is not None:
        advice = f" and add --against static:{spec.replicas}" if spec.replicas else ""
        errors.append(
            FieldError(
                "spec.replicas",
                f"is {spec.replicas}, which pins the replicas, so there is nothing to simulate; remove it{advice}",
            )
        )
    if gpus != hardware.gpus:
        errors.append(
            FieldError(
                "spec.resources.accelerator",
                f"a replica has {gpus} accelerators, but {where} runs on {hardware.gpus}; "
                "change the service, or use a hardware file with gpus and coefficients for it",
            )
        )
    longest = spec.engine.max_model_length
    if longest is not None and longest > hardware.kv_capacity_tokens:
        errors.append(
            FieldError(
                "spec.engine.maxModelLength",
                f"is {longest}, but {where} has a KV cache of {hardware.kv_capacity_tokens:.0f} tokens, "
                "so vLLM would not start; lower it or choose other hardware",
            )
        )
    objective_s, lowest_s = edges_of(settings).batch_time_s, floor_s(hardware)
    if lowest_s > objective_s:
        errors.append(
            FieldError(
                "spec.objectives.batchTimeMilliseconds",
                f"is {settings.batch_time_objective_s * 1e3:g} (judged at {objective_s * 1e3:g}), but {where} cannot do that: "
                f"floor {lowest_s * 1e3:.1f} ms with a single sequence; raise it or choose other hardware",
            )
        )
    return errors


def _notes(spec: InferenceServiceSpec) -> list[str]:
    notes = []
    if spec.paused:
        notes.append("spec.paused is set: Fleetkeeper changes nothing")
    if spec.scaling.mode is not ScalingMode.AUTO:
        notes.append(f"scaling.mode is {spec.scaling.mode}: Fleetkeeper does not scale the service")
    if spec.batching.mode is not BatchingMode.AUTO:
        notes.append(f"batching.mode is {spec.batching.mode}: the batch limits do not change")
    if spec.routing.policy is not RoutingPolicy.LEAST_LOADED:
        notes.append(
            f"routing.policy is {spec.routing.policy}, but the simulated router is LeastLoaded"
        )
    return notes
