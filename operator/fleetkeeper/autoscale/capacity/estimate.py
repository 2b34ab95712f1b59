"""The estimate of a service's fleet: the step-time model and its targets, pods by state, the demand."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetkeeper.autoscale.capacity.demand import Demand, smoothed
from fleetkeeper.autoscale.capacity.step_time_model import StepModel, learned
from fleetkeeper.autoscale.capacity.supply import ColdStart, Supply, measured_cold_start, supply_of
from fleetkeeper.autoscale.capacity.targets import Targets, decide_targets
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlInputs, Grade, Limits


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate after one tick."""

    model: StepModel = field(default_factory=StepModel)
    targets: Targets | None = None
    cold_start: ColdStart = field(default_factory=ColdStart)
    demand: Demand = field(default_factory=Demand)
    supply: Supply = field(default_factory=Supply)
    capacity: float = 0.0
    """Sequences that a replica can run: C* if the model has it, else the current limit; 0 if
    neither is known."""


def updated_estimate(
    before: Estimate,
    inputs: ControlInputs,
    signals: Signals,
    limits: Limits | None,
    now: float,
    *,
    planned_per_s: float,
) -> Estimate:
    """Return the estimate after one tick. The model and its targets change once per window.

    `limits`: those in force (None: never set). `planned_per_s`: the arrivals for which replicas are sized.
    Without traffic the targets stay.
    """
    model, targets, demand = before.model, before.targets, before.demand
    if signals.window is not None:
        model = learned(model, signals.window)
        found = decide_targets(model, signals, inputs.settings)
        targets = targets if found is None and signals.served_per_s == 0 else found
    if signals.grade is Grade.FRESH and signals.coverage >= 1.0:
        demand = smoothed(demand, planned_per_s)
    cold_start = measured_cold_start(before.cold_start, inputs.pods)
    supply = supply_of(inputs.pods, signals.hung_pods, cold_start.seconds, now)
    capacity = float(limits.sequences) if limits is not None else 0.0
    if targets is not None:
        capacity = targets.capacity
    return Estimate(model, targets, cold_start, demand, supply, capacity)
