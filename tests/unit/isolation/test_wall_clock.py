"""Clocks that are wrong or set: time never jumps inside the process, and is that of the API server."""

from __future__ import annotations

import asyncio
from email.utils import formatdate

import pytest
from aiohttp import web

from fleetkeeper.adapters.clock import APART_FOR_S, ClockApart, SystemClock
from fleetkeeper.autoscale.signals.pod_history import is_warmed_up
from fleetkeeper.autoscale.signals.samples import Gauges
from fleetkeeper.autoscale.signals.series_map import edges_of
from fleetkeeper.autoscale.types import ControlSettings, Grade
from fleetkeeper.runtime.autoscaler.readings import Target
from fleetkeeper.runtime.autoscaler.sources import is_lost
from fleetkeeper.runtime.queue import Key
from tests.support.autoscale.control_cases import Loop, pod_view, sample
from tests.support.plane.loopback_api import served

TRUE = 1_700_000_000.0
HOUR_S = 3600.0


class Machine:
    """The standard library's clocks, as far as `adapters/clock.py` reads them."""

    def __init__(self, off_s: float = 0.0) -> None:
        self.elapsed_s = 100.0
        self.off_s = off_s

    @property
    def true(self) -> float:
        """What a right clock shows."""
        return TRUE + self.elapsed_s

    def time(self) -> float:
        """The wall clock."""
        return self.true + self.off_s

    def monotonic(self) -> float:
        """The clock that is never set."""
        return self.elapsed_s

    def date(self, apart_s: float = 0.0) -> str:
        """The API server's header."""
        return formatdate(int(self.true + apart_s), usegmt=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr("fleetkeeper.adapters.clock.time", found)
    return found


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
def test_a_step_of_the_machines_clock_is_no_step_of_ours(machine: Machine, step_s: float) -> None:
    """A minute later a minute has passed, whatever NTP did to the wall clock."""
    clock = SystemClock()
    before = clock.now()
    machine.off_s = step_s
    machine.elapsed_s += 60.0
    assert clock.now() - before == pytest.approx(60.0)


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
def test_a_step_neither_stops_control_nor_moves_a_number(machine: Machine, step_s: float) -> None:
    """Samples of other machines go on as before: signals stay fresh, limits are renewed, nothing goes."""
    clock = SystemClock()
    pods = tuple(pod_view(f"chat-{number}", now=machine.true) for number in range(2))
    loop = Loop(ControlSettings(scale_down_delay_s=1200.0), started=TRUE - 7200.0, pods=pods)
    puts = 0
    for tick in range(60):
        if tick == 30:
            machine.off_s = step_s
        loop.now = clock.now()
        read = Gauges(running=20.0, limit_sequences=32.0, limit_generation=loop.generation)
        rows = [
            sample(machine.true, pod.name, gauges=read, origin=TRUE - 3600.0) for pod in loop.pods
        ]
        decision = loop.tick(rows, put_outcomes=loop.outcomes)
        machine.elapsed_s += 5.0
        if tick < 30:
            continue
        puts += len(decision.puts)
        assert decision.signals.grade is Grade.FRESH, tick
        assert decision.breakers.control.is_closed
        assert decision.breakers.load.is_closed
        assert decision.replicas.value >= len(pods)
    assert puts > 0, "no lease was renewed after the step"


@pytest.mark.parametrize("off_s", [-HOUR_S, HOUR_S])
def test_a_wrong_clock_at_the_start_is_put_right_by_the_first_answer(
    machine: Machine, off_s: float
) -> None:
    """And its later correction changes nothing."""
    machine.off_s = off_s
    clock = SystemClock()
    clock.observe_date(machine.date())
    assert clock.now() == pytest.approx(machine.true, abs=1.0)
    assert clock.machine_off_s == pytest.approx(off_s, abs=1.0)
    machine.off_s = 0.0
    assert clock.now() == pytest.approx(machine.true, abs=1.0)


def test_a_clock_that_is_close_keeps_its_fractions(machine: Machine) -> None:
    """The header has whole seconds; a second more or less is nobody's error."""
    machine.off_s = 1.25
    clock = SystemClock()
    clock.observe_date(machine.date())
    assert clock.now() == machine.time()
    assert clock.machine_off_s == 0.0


async def kept(clock: SystemClock) -> bool:
    """Whether the process goes on."""
    task = asyncio.create_task(clock.keep())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        return True
    with pytest.raises(ClockApart):
        await task
    return False


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
async def test_where_the_api_servers_clock_was_set_the_process_begins_anew(
    machine: Machine, step_s: float
) -> None:
    """Not at the first answer that says so; until then time does not jump."""
    clock = SystemClock()
    clock.observe_date(machine.date())
    before, began = clock.now(), machine.elapsed_s
    while machine.elapsed_s - began <= APART_FOR_S:
        machine.elapsed_s += 2.0
        assert await kept(clock)
        clock.observe_date(machine.date(step_s))
    assert clock.now() - before == machine.elapsed_s - began
    assert not await kept(clock)


async def test_one_api_server_of_several_with_a_wrong_clock_ends_nothing(machine: Machine) -> None:
    """Answers of the others come in between; text that is no date is ignored."""
    clock = SystemClock()
    clock.observe_date(machine.date())
    for _ in range(100):
        machine.elapsed_s += 2.0
        for date in (machine.date(HOUR_S), "garbage", "", machine.date()):
            clock.observe_date(date)
    assert await kept(clock)


async def test_every_answer_of_the_api_server_tells_the_time() -> None:
    """Refusals too."""
    dates: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        del request
        return web.json_response({}, headers={"Date": "Tue, 14 Nov 2023 22:13:20 GMT"})

    async with served(handler) as client:
        await client.request("GET", "/x")
        client.on_date = dates.append
        await client.request("GET", "/x")
    assert dates == ["Tue, 14 Nov 2023 22:13:20 GMT"]


@pytest.mark.parametrize(("ready_s_ago", "warmed_up"), [(61, True), (59, False), (-3, False)])
def test_a_pods_first_minute_is_not_judged(ready_s_ago: float, warmed_up: bool) -> None:
    assert is_warmed_up(pod_view(age_s=ready_s_ago), pod_view().created + 3660.0) is warmed_up


def test_a_pod_that_became_ready_in_the_future_is_no_young_one() -> None:
    """Its node's clock was ahead: waiting for that moment would stop control for an hour."""
    assert is_warmed_up(pod_view(age_s=-HOUR_S), pod_view().created + 3660.0)


@pytest.mark.parametrize(
    ("sample_s_ago", "lost"), [(3.0, False), (-3.0, False), (HOUR_S, True), (-HOUR_S, True)]
)
def test_samples_from_the_future_are_not_fresh(sample_s_ago: float, lost: bool) -> None:
    """Prometheus' clock is wrong: its pods are read directly."""
    pod = pod_view()
    now = pod.created + 3660.0
    target = Target(Key("team-a", "chat"), edges_of(ControlSettings()), (pod,))
    assert is_lost(target, [sample(now - sample_s_ago, pod.name)], now) is lost
