"""Preparation of a simulated engine: vLLM's arguments and environment, without a model, a GPU or vLLM."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

import fleetkeeper_engine
from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.devices.kinds import KINDS
from fleetkeeper_engine.shm.region import FILE as REGION_FILE
from fleetkeeper_engine.simulated.simulation_settings import (
    ENVIRONMENT,
    VERSION_TEXT,
    SimulationSettings,
    TimedFault,
)
from fleetkeeper_engine.simulation import Simulation
from fleetkeeper_engine.spec import EngineDocument
from fleetkeeper_engine.supervisor.launch.argv import Launch, desired_argv, desired_environment
from fleetkeeper_engine.supervisor.launch.downloads import PACKAGE_PATH
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.features import Features
from fleetkeeper_engine.supervisor.launch.memory_plan import GIB, MemoryPlan
from fleetkeeper_engine.supervisor.launch.prepared import Prepared, pod_limit_bytes
from fleetkeeper_steps.costs import StepCosts
from fleetkeeper_steps.hardware import known_hardware

logger = logging.getLogger("fleetkeeper.prepare")

ENTRY = "fleetkeeper_engine.simulated"
DEFAULT_MAX_LENGTH = 131_072
"""Tokens of the longest sequence, if the document has none: that of the models in the fits."""


def prepare_simulated(
    document: EngineDocument,
    simulation: Simulation,
    environment: Mapping[str, str],
    run_directory: Path,
) -> Prepared:
    """Decide the start of a simulated engine. Nothing is fetched, and no weights are planned.

    Raises:
        StartRefusedError: if there is no such hardware.
    """
    settings = desired_settings(simulation)
    limit = pod_limit_bytes(document)
    cap = limit * document.memory.cap_percent // 100
    plan = MemoryPlan(
        cap_bytes=cap,
        explanation=f"simulated engine: no weights and no KV cache in {limit / GIB:.2f} GiB",
    )
    logger.info("memory: %s", plan.explanation)
    launch = Launch(
        python=sys.executable,
        entry=ENTRY,
        model=document.model.source,
        dtype=document.engine.dtype,
        adapters={adapter.name: adapter.path for adapter in document.model.adapters},
        lora_rank=1,
        max_length=document.engine.max_model_length or DEFAULT_MAX_LENGTH,
        region=str(run_directory / REGION_FILE),
        package_path=PACKAGE_PATH,
        internal_token=secrets.token_urlsafe(24),
    )
    child = desired_environment(document, plan, launch, environment)
    return Prepared(
        argv=desired_argv(document, plan, launch),
        environment={**child, ENVIRONMENT: settings.to_json()},
        plan=plan,
        features=Features(VERSION_TEXT, ENTRY, Path(fleetkeeper_engine.__file__).parent),
        internal_token=launch.internal_token,
        measured_key="",
        planned_bytes=cap,
        devices=KINDS[document.accelerator].open(environment, None, limit),
    )


def desired_settings(simulation: Simulation) -> SimulationSettings:
    """Return the settings of the engine: coefficients instead of the name of the hardware.

    Raises:
        StartRefusedError: if there is no such hardware.
    """
    hardware = known_hardware().get(simulation.hardware)
    if hardware is None:
        raise StartRefusedError(
            DeathClass.BAD_ENGINE_OPTION,
            f"simulation.hardware {simulation.hardware!r} is unknown; use one of {', '.join(known_hardware())}",
        )
    own, start = simulation.costs, simulation.start_seconds
    costs = hardware.costs
    if own is not None:
        costs = StepCosts(
            own.t0_seconds,
            own.w_seconds,
            own.g_seconds,
            own.b_seconds,
            own.c_seconds,
            own.q_seconds,
            own.request_seconds,
        )
    return SimulationSettings(
        costs=tuple(costs),
        kv_capacity_tokens=simulation.kv_capacity_tokens or int(hardware.kv_capacity_tokens),
        speed=simulation.speed,
        seed=simulation.seed,
        weights_s=start.weights,
        load_s=start.load,
        warm_up_s=start.warm_up,
        faults=tuple(
            TimedFault(fault.kind.value, fault.after_seconds) for fault in simulation.faults
        ),
    )
