"""The effect of a raise: judged over two windows, if it was more than two notches."""

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
    limits=Limits(100, 1024), changed=NOW, raised=NOW, before_raise=BeforeRaise(BEFORE, 0.99)
)
MORE = replace(WIDER, limits=Limits(125, 512))


@pytest.mark.parametrize("memory", [WIDER, MORE], ids=["wider steps", "more sequences"])
def test_the_effect_of_a_raise_is_judged_against_the_limits_before_it(memory: BatchMemory) -> None:
    """Attainment 0.99 before, 0.7 after."""
    worse = _worse(memory, SIGNALS, SETTINGS)
    assert worse is not None
    assert worse.by == pytest.approx(0.29)
    assert worse.before == BEFORE


@pytest.mark.parametrize(
    "limits", [Limits(100, 768), Limits(121, 512)], ids=["tokens", "sequences"]
)
def test_a_raise_of_two_notches_is_not_judged(limits: Limits) -> None:
    """Steps that are too long take it back, without a breaker."""
    assert _worse(replace(WIDER, limits=limits), SIGNALS, SETTINGS) is None


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
