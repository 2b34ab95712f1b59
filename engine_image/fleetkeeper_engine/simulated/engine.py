"""The engine behind the API: the core, the output processor, and its end."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fleetkeeper_engine.simulated.config import CacheConfig, SchedulerConfig, SimulatedConfig
from fleetkeeper_engine.simulated.core import SequenceOutput, SimulatedCore, Work
from fleetkeeper_engine.simulated.options import Options
from fleetkeeper_engine.simulated.processor import (
    Collector,
    EngineCoreRequest,
    EngineDeadError,
    OutputProcessor,
)
from fleetkeeper_engine.simulated.series import Gauges, Series
from fleetkeeper_engine.simulated.simulation_settings import SimulationSettings
from fleetkeeper_steps.costs import StepCosts

logger = logging.getLogger("vllm.fleetkeeper")


class Engine:
    """One simulated engine. All of it runs in one event loop."""

    def __init__(self, options: Options, settings: SimulationSettings) -> None:
        self.options = options
        self.settings = settings
        self.series = Series(options.served_model_names[0], options.max_model_len)
        self.processor = OutputProcessor(self.series)
        self.core = SimulatedCore(desired_config(options, settings), self._on_step)
        self.dead: EngineDeadError | None = None
        self.on_death: Callable[[], None] = _nothing
        """Called once when the core has ended by itself."""
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to run steps."""
        self._loop = asyncio.create_task(self.core.run(), name="core")
        self._loop.add_done_callback(self._core_ended)

    async def stop(self) -> None:
        """End the core."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])

    def submit(self, requests: Sequence[EngineCoreRequest]) -> Collector:
        """Queue the sequences of one request; the collector has their answers, by index.

        Raises:
            ValueError: if a sequence can never fit into the KV cache.
            EngineDeadError: if the engine has ended.
        """
        if self.dead is not None:
            raise self.dead
        collector = Collector()
        added: list[str] = []
        try:
            for index, request in enumerate(requests):
                self.core.add(work_of(request))
                added.append(request.request_id)
                self.processor.add_request(request, index, collector)
        except ValueError:
            self.abort(added)
            raise
        return collector

    def abort(self, request_ids: Iterable[str]) -> None:
        """End sequences. Those that have ended are ignored."""
        if aborted := self.processor.abort_requests(list(request_ids)):
            self.core.abort(aborted)

    def die(self, error: EngineDeadError) -> None:
        """End the core and fail every request."""
        self.dead = error
        if self._loop is not None:
            self._loop.cancel()
        self.processor.propagate_error(error)
        self.on_death()

    def gauges(self) -> Gauges:
        """Return the state of the scheduler."""
        scheduler: Any = self.core.scheduler
        return Gauges(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.kv_cache_manager.usage,
            preemptions=getattr(scheduler, "num_preemptions", 0),
            num_gpu_blocks=scheduler.cache_config.num_gpu_blocks,
            block_size=scheduler.cache_config.block_size,
        )

    def _core_ended(self, loop: asyncio.Task[None]) -> None:
        if self.dead is None and not loop.cancelled():
            logger.error("EngineCore encountered a fatal error.", exc_info=loop.exception())
            self.die(EngineDeadError())

    def _on_step(self, outputs: list[SequenceOutput]) -> None:
        stopped = self.processor.process_outputs(outputs, time.monotonic())
        if stopped:
            self.core.abort(stopped)


def _nothing() -> None:
    """Do nothing."""


def work_of(request: EngineCoreRequest) -> Work:
    """Return what the core computes for a sequence."""
    sampling = request.sampling
    ends_after = None
    if not sampling.ignore_eos and sampling.max_tokens:
        ends_after = max(request.text.natural_length, sampling.min_tokens)
    return Work(
        request_id=request.request_id,
        prompt=request.prompt_token_ids,
        max_tokens=sampling.max_tokens,
        ends_after=ends_after,
        priority=request.priority,
        arrival_s=request.arrival_s,
        lora_name=request.lora_request.lora_name if request.lora_request else None,
    )


def desired_config(options: Options, settings: SimulationSettings) -> SimulatedConfig:
    """Return what the core and its scheduler read.

    Raises:
        ImportError, AttributeError: if --scheduler-cls names nothing.
    """
    scheduler: object = None
    if options.scheduler_cls is not None:
        scheduler = imported(options.scheduler_cls)
    return SimulatedConfig(
        SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
            enable_chunked_prefill=options.enable_chunked_prefill,
            scheduler_cls=scheduler,
        ),
        CacheConfig(
            num_gpu_blocks=max(1, settings.kv_capacity_tokens // options.block_size),
            block_size=options.block_size,
            enable_prefix_caching=options.enable_prefix_caching,
        ),
        StepCosts(*settings.costs),
        speed=settings.speed,
    )


def imported(path: str) -> Any:  # noqa: ANN401 - a class or a callable
    """Return the object that a dotted path names, as vLLM does for its options.

    Raises:
        ImportError, AttributeError: if there is none.
    """
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
