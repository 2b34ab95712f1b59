"""Preparation of a start, from the document to vLLM's arguments: fetch, read, probe and plan."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.devices.cgroup import read_cpu_quota
from fleetkeeper_engine.devices.interface import Accelerator, Devices, NoDevicesError
from fleetkeeper_engine.devices.kinds import KINDS
from fleetkeeper_engine.shm.region import FILE as REGION_FILE
from fleetkeeper_engine.spec import DType, EngineDocument
from fleetkeeper_engine.supervisor.launch import cpu_probe
from fleetkeeper_engine.supervisor.launch.argv import (
    Launch,
    decided_entry,
    desired_argv,
    desired_environment,
)
from fleetkeeper_engine.supervisor.launch.downloads import (
    PACKAGE_PATH,
    Spawn,
    fetched_directory,
    fetched_objects,
    own_environment,
)
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.features import Features, find_features
from fleetkeeper_engine.supervisor.launch.memory_plan import (
    CpuNeeds,
    MemoryPlan,
    activations_bytes,
    desired_cpu_base_bytes,
    desired_device_reserve_bytes,
    plan_cpu,
    plan_device,
    sequence_bytes,
)
from fleetkeeper_engine.supervisor.launch.model_files import (
    ModelFacts,
    largest_tensor_bytes,
    lora_rank,
    read_facts,
)
from fleetkeeper_engine.supervisor.launch.object_storage import (
    LOAD_FORMAT,
    MIB,
    POD_SHARE,
    desired_buffer_bytes,
    is_object_storage,
    require_streamer,
)
from fleetkeeper_engine.supervisor.launch.prepare_simulated import prepare_simulated
from fleetkeeper_engine.supervisor.launch.prepared import Prepared, pod_limit_bytes
from fleetkeeper_engine.supervisor.launch.start_measurements import read_measured

logger = logging.getLogger("fleetkeeper.prepare")


async def prepare(
    document: EngineDocument, environment: Mapping[str, str], run_directory: Path, spawn: Spawn
) -> Prepared:
    """Collect the facts and decide the start.

    Raises:
        StartRefusedError: if the engine cannot be started as specified.
    """
    if document.simulation is not None:
        return prepare_simulated(document, document.simulation, environment, run_directory)
    features = find_features()
    model = document.model
    streamed = is_object_storage(model.source)
    if streamed:
        require_streamer()
        directory = await fetched_objects(model.source, environment, spawn)
    else:
        directory = await fetched_directory(model.source, model.revision, environment, spawn)
    adapters = {
        adapter.name: await fetched_directory(adapter.path, adapter.revision, environment, spawn)
        for adapter in model.adapters
    }
    facts = read_facts(directory, adapters.values())
    dtype = await _decided_dtype(document, facts, environment, spawn)
    key = _measured_key(document, features)
    measured = read_measured(run_directory, key)
    kind, ranks = KINDS[document.accelerator], document.engine.tensor_parallel_size
    try:
        devices = kind.open(environment, ranks, pod_limit_bytes(document))
    except NoDevicesError as error:
        raise StartRefusedError(DeathClass.BAD_ENGINE_OPTION, str(error)) from error
    if kind.capabilities.own_memory:
        plan, planned = _device_plan(document, facts, devices, measured)
    else:
        plan, planned = _cpu_plan(document, facts, dtype, measured)
    if streamed:
        plan = _with_stream_buffer(plan, document, directory)
    logger.info("memory: %s", plan.explanation)
    entry, spawned = decided_entry(document, features, environment)
    if spawned:
        logger.info("vLLM's processes are spawned: %s", spawned)
    launch = Launch(
        python=sys.executable,
        entry=entry,
        model=model.source if streamed else str(directory),
        load_format=LOAD_FORMAT if streamed else None,
        dtype=dtype,
        adapters={name: str(path) for name, path in adapters.items()},
        lora_rank=lora_rank(facts.largest_adapter_rank),
        max_length=document.engine.max_model_length or facts.max_length,
        region=str(run_directory / REGION_FILE),
        package_path=PACKAGE_PATH,
        internal_token=secrets.token_urlsafe(24),
        eager=document.accelerator is Accelerator.CPU and shutil.which("g++") is None,
        threads=desired_threads(read_cpu_quota(), len(os.sched_getaffinity(0))),
    )
    return Prepared(
        argv=desired_argv(document, plan, launch),
        environment=desired_environment(document, plan, launch, environment),
        plan=plan,
        features=features,
        internal_token=launch.internal_token,
        measured_key=key,
        planned_bytes=planned,
        devices=devices,
    )


async def _decided_dtype(
    document: EngineDocument, facts: ModelFacts, environment: Mapping[str, str], spawn: Spawn
) -> DType:
    """Return the format to load in. On CPU a 16-bit format is probed first; elsewhere vLLM resolves `auto`."""
    wanted = document.engine.dtype
    if document.accelerator is not Accelerator.CPU:
        return wanted
    dtype = facts.dtype if wanted is DType.AUTO else wanted
    if dtype is DType.FLOAT32:
        return dtype
    child = await spawn(
        [sys.executable, "-m", cpu_probe.__name__, dtype.value],
        own_environment(environment),
    )
    status = await child.ended
    if status == 0:
        return dtype
    died = f"a {dtype.value} product ended a test process with {_ending(status)}"
    if wanted is not DType.AUTO:
        raise StartRefusedError(
            DeathClass.BAD_ENGINE_OPTION,
            f"this CPU cannot compute in {dtype.value} ({died}); set engine.dtype to float32 or auto",
        )
    logger.warning("%s, using float32 instead", died)
    return DType.FLOAT32


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def _measured_key(document: EngineDocument, features: Features) -> str:
    """Return a key that is equal for starts with equal memory beyond their plan."""
    inputs = document.model_dump_json(include={"accelerator", "model", "engine", "batching"})
    return hashlib.sha256(f"{features.vllm_version} {inputs}".encode()).hexdigest()[:16]


def _device_plan(
    document: EngineDocument, facts: ModelFacts, devices: Devices, measured: int | None
) -> tuple[MemoryPlan, int]:
    total = min(device.total_bytes for device in devices.read())
    dtype = document.engine.dtype if document.engine.dtype is not DType.AUTO else facts.dtype
    if document.engine.dtype is DType.AUTO and dtype is DType.FLOAT32:
        dtype = DType.BFLOAT16  # vLLM loads float32 models in 16 bits by default
    weights = facts.weights_bytes(dtype, quantized=document.engine.quantization is not None)
    plan = plan_device(
        total_bytes=total,
        cap_percent=document.memory.cap_percent,
        reserve_bytes=desired_device_reserve_bytes(total, measured),
        weights_bytes_per_rank=weights // document.engine.tensor_parallel_size,
    )
    return plan, math.floor((plan.gpu_memory_utilization or 0.0) * total)


def _cpu_plan(
    document: EngineDocument, facts: ModelFacts, dtype: DType, measured: int | None
) -> tuple[MemoryPlan, int]:
    batching, engine = document.batching, document.engine
    length = engine.max_model_length or facts.max_length
    weights = facts.weights_bytes(dtype, quantized=engine.quantization is not None)
    # On CPU the cache's size is given without adapters; elsewhere vLLM counts them in its own budget.
    weights += facts.adapters_bytes(dtype)
    one = sequence_bytes(length, facts.kv_bytes_per_token(dtype))
    base = desired_cpu_base_bytes(
        ranks=engine.tensor_parallel_size,
        activations_bytes=activations_bytes(
            tokens=batching.max_tokens,
            sequences=batching.max_sequences,
            hidden=facts.hidden,
            intermediate=facts.intermediate,
            vocabulary=facts.vocabulary,
        ),
        measured_bytes=measured,
        streamed=is_object_storage(document.model.source),
    )
    plan = plan_cpu(
        limit_bytes=pod_limit_bytes(document),
        cap_percent=document.memory.cap_percent,
        needs=CpuNeeds(weights, base, one, one * batching.max_sequences),
    )
    return plan, weights + (plan.kv_cache_bytes or 0)


def _with_stream_buffer(plan: MemoryPlan, document: EngineDocument, directory: Path) -> MemoryPlan:
    """Return the plan with the streamer's buffers.

    On CPU they take the room of the KV cache, which vLLM allocates after it has loaded the weights.
    """
    room = plan.kv_cache_room_bytes
    if room is None:
        room = pod_limit_bytes(document) // POD_SHARE
    buffer = desired_buffer_bytes(
        largest_bytes=largest_tensor_bytes(directory),
        room_bytes=room,
        ranks=document.engine.tensor_parallel_size,
    )
    text = f"{plan.explanation}; buffers of streamed weights {buffer // MIB} MiB per rank"
    return replace(plan, stream_buffer_bytes=buffer, explanation=text)


def desired_threads(quota: float | None, cpus: int) -> int:
    """Return the engine's threads: the pod's CPUs, less one for the API server, at least one.

    Without its own core the API server takes one from a thread at every token it sends, and the
    others wait for that thread: on two CPUs a step of 32 sequences took twice as long. vLLM also
    keeps a core where it binds threads to cores.

    Args:
        quota: CPUs that the pod may use; None means all. More threads would be throttled.
        cpus: CPUs that the pod sees.
    """
    usable = cpus if quota is None else min(cpus, math.ceil(quota))
    return max(1, usable - 1)
