"""The effect of a raise: judged over two windows, and reverted if it only did harm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BeforeRaise
from fleetkeeper.autoscale.rules.evidence import _worse
from fleetkeeper.autoscale.signals.samples import Gauges
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper.autoscale.types import ControlSettings, Grade, Limits
from tests.support.autoscale.control_cases import NOW

SETTINGS = ControlSettings()
BEFORE = Limits(100, 512)
WINDOWS = tuple(
    Window(NOW + 10 * n, NOW + 10 * n + 10, steps=200, steps_within=140) for n in range(2)
)
SIGNALS = Signals(
    Grade.FRESH,
    1.0,
    ready_pods=2,
    reporting_pods=2,
    gauges=Gauges(running=240),
    queue_wait_s=2.0,
    windows=WINDOWS,
    window=WINDOWS[-1],
)
WIDER = BatchMemory(
    limits=Limits(100, 768), changed=NOW, raised=NOW, before_raise=BeforeRaise(BEFORE, 0.99, 0.3)
)
MORE = replace(WIDER, limits=Limits(125, 512))


@pytest.mark.parametrize("memory", [WIDER, MORE], ids=["wider steps", "more sequences"])
def test_a_raise_that_only_did_harm_is_reverted(memory: BatchMemory) -> None:
    """Attainment 0.99 before, 0.7 after, and requests wait longer."""
    worse = _worse(memory, SIGNALS, SETTINGS)
    assert worse is not None
    assert worse.by == pytest.approx(0.29)
    assert worse.kept == BEFORE


@pytest.mark.parametrize(
    ("memory", "signals"),
    [
        pytest.param(MORE, replace(SIGNALS, gauges=Gauges(running=200)), id="it was not used"),
        pytest.param(
            replace(WIDER, before_raise=BeforeRaise(BEFORE, 0.99, 11.0)),
            SIGNALS,
            id="it took a queue away",
        ),
        pytest.param(
            replace(WIDER, before_raise=BeforeRaise(BEFORE, 0.94, 0.3)),
            SIGNALS,
            id="the objective was missed before",
        ),
    ],
)
def test_another_raise_is_reported_but_not_reverted(memory: BatchMemory, signals: Signals) -> None:
    """The breaker opens, with the same limits as after any other cause."""
    worse = _worse(memory, signals, SETTINGS)
    assert worse is not None
    assert worse.by > 0.2
    assert worse.kept is None


@pytest.mark.parametrize(
    ("memory", "signals"),
    [
        pytest.param(replace(WIDER, before_raise=None), SIGNALS, id="judged already"),
        pytest.param(replace(WIDER, changed=NOW + 5), SIGNALS, id="changed since"),
        pytest.param(WIDER, replace(SIGNALS, windows=WINDOWS[:1]), id="one window so far"),
        pytest.param(WIDER, replace(SIGNALS, window=None), id="no window closed now"),
    ],
)
def test_too_little_is_not_judged(memory: BatchMemory, signals: Signals) -> None:
    """Two whole windows after the raise, once, when the second has closed."""
    assert _worse(memory, signals, SETTINGS) is None
