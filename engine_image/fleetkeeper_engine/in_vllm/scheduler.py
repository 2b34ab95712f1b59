"""Live batch limits: a mixin for the scheduler class that vLLM would have chosen.

vLLM's `--scheduler-cls` names `live_scheduler`, which vLLM calls like a class. A fault of this code
never ends the engine: observing and limiting stop, scheduling continues at start-up limits.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from fleetkeeper_engine.in_vllm.live_scheduling import NEEDED, LiveScheduling, SchedulerMixin
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.region import Region

logger = logging.getLogger("vllm.fleetkeeper")

T = TypeVar("T")


class LiveLimits(SchedulerMixin):
    """A mixin in front of a vLLM scheduler class."""

    _live: LiveScheduling | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's arguments, passed on
        super().__init__(*args, **kwargs)
        self._guarded(self._start_live)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as vLLM's
        """Schedule as vLLM does, under the limits in force."""
        if self._live is not None:
            self._guarded(self._live.before_schedule)
        step = super().schedule(*args, **kwargs)  # type: ignore[misc] # the class vLLM chose
        if self._live is not None:
            self._guarded(self._live.after_schedule, step)
        return step

    def get_grammar_bitmask(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as vLLM's
        """Return vLLM's result. The step is with the workers by then, so there is time to count."""
        bitmask = super().get_grammar_bitmask(*args, **kwargs)  # type: ignore[misc]
        if self._live is not None:
            self._guarded(self._live.while_running)
        return bitmask

    def update_from_output(
        self,
        scheduler_output: Any,  # noqa: ANN401 - as vLLM's
        model_runner_output: Any,  # noqa: ANN401 - as vLLM's
        *args: Any,  # noqa: ANN401 - as vLLM's
        **kwargs: Any,  # noqa: ANN401 - as vLLM's
    ) -> Any:  # noqa: ANN401 - as vLLM's
        """Update as vLLM does, and record the time."""
        if self._live is not None and not self._live.followed:
            # No grammar was requested (pooling models): read the step before its requests are gone.
            self._guarded(self._live.while_running)
        result = super().update_from_output(  # type: ignore[misc] # the class vLLM chose
            scheduler_output, model_runner_output, *args, **kwargs
        )
        if self._live is not None:
            self._guarded(self._live.after_update, scheduler_output, result)
        return result

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as vLLM's
        if self._live is not None:
            self._guarded(self._live.record_preemption)
        return super()._preempt_request(*args, **kwargs)  # type: ignore[misc]

    def _start_live(self) -> None:
        self._live = LiveScheduling(self, Region.of_environment(), VllmSettings.of_environment())
        logger.info("live batch limits: %s", "on" if self._live.supported else "not supported")

    def _guarded(self, action: Callable[..., None], *args: Any) -> None:  # noqa: ANN401 - passed on
        try:
            action(*args)
        except Exception:
            # vLLM's interface is not public. After any change in it, requests continue at start-up limits.
            logger.exception("live batch limits are off after an error; scheduling continues")
            live, self._live = self._live, None
            if live is not None:
                _restore(self, live)


def _restore(scheduler: Any, live: LiveScheduling) -> None:  # noqa: ANN401 - a vLLM scheduler
    live.supported = False
    for name, value in zip(NEEDED, live.ceilings(), strict=True):
        if hasattr(scheduler, name):
            setattr(scheduler, name, value)
    live.record.disable_instrumentation()
    live.publish()


def live_scheduler(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - called by vLLM like its class
    """Create the scheduler that vLLM would have created, with live limits mixed in.

    Raises:
        Exception: any exception of the scheduler's own constructor.
    """
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    return mixed_into(chosen_class(config))(*args, **kwargs)


def mixed_into(base: type[T]) -> type[T]:
    """Return a subclass of `base` with live limits."""
    return type(f"Live{base.__name__}", (LiveLimits, base), {"__module__": __name__})


def chosen_class(config: Any) -> type[Any]:  # noqa: ANN401 - vLLM's VllmConfig
    """Return the class that vLLM chooses when none is configured."""
    choosing = copy.copy(config.scheduler_config)
    choosing.scheduler_cls = None
    if getattr(config, "diffusion_config", None) is not None:
        kind = "DiffusionAsyncScheduler" if choosing.async_scheduling else "DiffusionScheduler"
        choosing.scheduler_cls = f"vllm.v1.core.sched.diffusion_scheduler.{kind}"
    chosen: type[Any] = choosing.get_scheduler_cls()
    return chosen
