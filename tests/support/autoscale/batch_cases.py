"""Inputs of the batch rules for tests."""

from __future__ import annotations

from dataclasses import replace

from fleetkeeper.autoscale.capacity.step_time_model import StepTime
from fleetkeeper.autoscale.capacity.targets import Shape, Targets
from fleetkeeper.autoscale.rules.batch.decide import decide_limits
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView
from fleetkeeper.autoscale.signals.samples import Counters, Gauges
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper.autoscale.types import ControlSettings, Grade, Limits
from tests.support.autoscale.control_cases import NOW

HELD = Limits(64, 2048)


SETTINGS = ControlSettings()


MEMORY = BatchMemory(limits=HELD, changed=NOW - 300)


def window(
    attained: float = 0.999, *, ago_s: float = 10.0, steps: float = 400.0, waited: float = 1.0
) -> Window:
    """A judged window that ended `ago_s` ago."""
    return Window(
        NOW - ago_s - 10,
        NOW - ago_s,
        requests=40,
        waited_within=40 * waited,
        steps=steps,
        steps_within=steps * attained,
        seconds=steps * 0.03,
    )


def windows(*attained: float) -> tuple[Window, ...]:
    """Windows in a row, the last one just closed."""
    count = len(attained)
    return tuple(window(a, ago_s=10.0 * (count - 1 - i)) for i, a in enumerate(attained))


def signals(**changes: object) -> Signals:
    """Two busy pods, 60 of 64 sequences used, all well."""
    base = Signals(
        Grade.FRESH,
        1.0,
        2,
        2,
        rates=Counters(
            wait_count_standard=8, arrivals_standard=8, prompt_tokens=4000, batch_time_count=60
        ),
        gauges=Gauges(running=120.0),
        queue_wait_s=0.05,
        batch_time_s=0.03,
        kv_ratio=0.4,
        kv_ratio_max=0.4,
        windows=windows(0.98, 0.98, 0.98, 0.98),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def targets(tokens: int | None, sequences: int) -> Targets:
    """Targets of so many tokens and sequences, of a 70B model on four H100 for 1000 + 200 tokens."""
    return Targets(
        tokens,
        float(sequences),
        sequences,
        float(sequences),
        StepTime(5.885e-3, 9.921e-3, 6.1715e-5, 7.919e-6, 28.57e-9),
        Shape(1000.0, 200.0, float(tokens or 8192)),
    )


def decided(view: BatchView, memory: BatchMemory = MEMORY) -> tuple[Limits, str]:
    """Limits and reason."""
    decision, _ = decide_limits(view, memory, NOW)
    return decision.value, decision.reason
