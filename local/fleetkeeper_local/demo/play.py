"""The stages of the demo: load once, a surge, once again; three faults; each ends with an event.

The surge's factor relies on a measurement that a slow moment of the machine may spoil. While fewer
replicas than the scenario's carry the load, it rises further.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fleetkeeper_local.demo.figure import FAULT, LOAD, Span
from fleetkeeper_local.demo.fleet import Fleet, PodFacts
from fleetkeeper_local.demo.installation import Installation
from fleetkeeper_local.demo.record import OURS, Frozen, Moment
from fleetkeeper_local.demo.scenario import VLLM, Scenario
from fleetkeeper_local.demo.stage import Stage
from fleetkeeper_local.demo.traffic import Traffic, joined
from fleetkeeper_local.demo.waiting_work import WaitingWork
from fleetkeeper_local.load.client import Patience
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Phase, plan_arrivals

POLL_S = 1.0
SEED = 20_240_607
QUIET_MIN_S, SURGE_MIN_S, LAST_MIN_S = 25.0, 45.0, 45.0
UNPINNED_S = 20.0
"""Time in which most of the capacity measurement's load leaves the control loop's windows."""
QUIET_MAX_S, SURGE_MAX_S, RECOVERY_MAX_S = 90.0, 480.0, 300.0
SETTLED_S = 10.0
"""Time that the surge continues with all replicas."""
RAMP_STEPS = 30
PROMETHEUS_GONE_S = 25.0
KILLED_S = 2.0
PATIENCE = Patience(attempts=100, max_wait_s=30.0, request_timeout_s=300.0, deadline_s=300.0)
"""A client that honors Retry-After, for five minutes."""


@dataclass(frozen=True, slots=True)
class Act:
    """An action to perform once, `at_s` seconds into a stage or later, once `when` is true."""

    at_s: float
    do: Callable[[], None]
    when: Callable[[], bool] = lambda: True


@dataclass
class Play:
    """One run on a fleet that is Ready.

    Attributes:
        stage: the cluster, and the actions it allows.
        installation: the operator.
        fleet: the service under load.
        base_url: the URL of its API from here.
        rate_per_s: requests per second in the first stage.
        on_progress: called about once per second, to show the progress.
        moments: the demo's actions, and their effects.
        work: a batch that is submitted before the surge; None without one.
        scenario: the load.
    """

    stage: Stage
    installation: Installation
    fleet: Fleet
    base_url: str
    rate_per_s: float
    on_progress: Callable[[Play], None]
    moments: list[Moment] = field(default_factory=list)
    work: WaitingWork | None = None
    scenario: Scenario = VLLM
    traffic: list[Traffic] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    frozen: PodFacts | None = None
    frozen_at_s: float | None = None
    ejected_at_s: float | None = None
    ended_at_s: float | None = None
    phase: str = ""
    _prometheus_gone_at_s: float | None = None
    _all_ready_since_s: float | None = None
    _killed: bool = False
    _engines: int = 0
    _grown_at_s: float = 0.0

    @property
    def start_s(self) -> float:
        """Start of the load by the wall clock."""
        return self.traffic[0].started_at_s

    def run(self) -> None:
        """Run all stages, and wait for the last responses."""
        began_s = time.time()
        try:
            release = Act(UNPINNED_S, self._unpin)
            self._load("x1", 1.0, QUIET_MIN_S, self._is_judged, QUIET_MAX_S, release)
            if self.work is not None:
                self._note(self.work.submit())
            self._surge()
            acts = [
                # With one replica only, every request would be in the frozen engine.
                Act(4.0, self._freeze, self._has_two_ready),
                Act(25.0, self._stop_prometheus),
                Act(25.0 + PROMETHEUS_GONE_S, self._start_prometheus),
            ]
            self._load("x1 again", 1.0, LAST_MIN_S, self._has_recovered, RECOVERY_MAX_S, *acts)
        finally:
            self._start_prometheus()
            for traffic in self.traffic:
                traffic.end()
        self._note("load stopped; waiting for the last responses")
        for traffic in self.traffic:
            traffic.wait()
        self._note(f"all requests ended, {time.time() - began_s:.0f} s after the start")

    def samples(self) -> list[Sample]:
        """Return all requests of all stages; times in seconds since the load started."""
        return joined(self.traffic)

    def frozen_times(self) -> Frozen | None:
        """Return when an engine was frozen, stopped receiving requests, and ended."""
        if self.frozen_at_s is None:
            return None
        now_s = time.time()
        return Frozen(
            self.frozen_at_s - self.start_s,
            (self.ejected_at_s or now_s) - self.start_s,
            (self.ended_at_s or now_s) - self.start_s,
        )

    # -- stages -------------------------------------------------------------------------------

    def _surge(self) -> None:
        """Apply more load than one replica carries, until the scenario's replicas have been ready for a while."""
        end_s = time.monotonic() + SURGE_MAX_S
        surge = self.scenario.surge
        kill = Act(10.0, self._kill_operators, self._has_grown)
        for number, factor in enumerate(surge):
            ramp_s = 0.0 if number else self.scenario.ramp_s
            self._engines, self._grown_at_s = len(self.fleet.engines()), time.monotonic()
            stalled = self._load(
                f"x{factor:g}",
                factor,
                ramp_s + SURGE_MIN_S,
                self._has_settled,
                end_s - time.monotonic(),
                *([] if self._killed else [kill]),
                ramp_s=ramp_s,
                unless=self._has_stalled if factor < surge[-1] else None,
            )
            if not stalled:
                return
            self._note(f"{self._engines} replicas carry the load: raising it")

    def _load(
        self,
        name: str,
        factor: float,
        min_s: float,
        until: Callable[[], bool],
        max_s: float,
        *acts: Act,
        ramp_s: float = 0.0,
        unless: Callable[[], bool] | None = None,
    ) -> bool:
        """Apply load for at least `min_s` and until `until` is true; run acts when they are due.

        The rate of the first stage rises to that of this one in `ramp_s`. It ends after `max_s` at the latest.

        Returns:
            True if it ended because of `unless`, which does not wait for acts.
        """
        rate = factor * self.rate_per_s
        phases = [Phase(name, max_s - ramp_s, rate)]
        if ramp_s:
            # It doubles in equal times: no fleet can follow a load that grows faster than it may double.
            rates = (self.rate_per_s * factor ** (step / RAMP_STEPS) for step in range(RAMP_STEPS))
            phases[:0] = [Phase(name, ramp_s / RAMP_STEPS, step_rate) for step_rate in rates]
        arrivals = plan_arrivals(phases, self.scenario.shape, SEED + len(self.traffic))
        traffic = Traffic(self.base_url, self.fleet.name, arrivals, PATIENCE).start()
        self.traffic.append(traffic)
        self.phase = name
        rises = f", reached in {ramp_s:.0f} s" if ramp_s else ""
        self._note(f"load {name}: {rate:.1f} requests/s{rises}")
        began_s, begin_s = time.time(), time.monotonic()
        waiting = sorted(acts, key=lambda act: act.at_s)
        cut = False
        while (elapsed_s := time.monotonic() - begin_s) < max_s:
            for act in [act for act in waiting if act.at_s <= elapsed_s and act.when()]:
                act.do()
                waiting.remove(act)
            self._watch_frozen()
            self.on_progress(self)
            if elapsed_s >= min_s:
                cut = unless is not None and unless()
                if cut or (not waiting and until()):
                    break
            time.sleep(POLL_S)
        traffic.end()
        if self.work is not None:
            self.work.record(name)
        self.spans.append(Span(began_s, time.time(), LOAD, f"{name}: {rate:.1f}/s"))
        for act in [] if cut else waiting:
            self._note(f"skipped, never due: {act.do.__name__.strip('_')}")
        return cut

    def _is_judged(self) -> bool:
        """Return whether the control loop uses its replicas' reports, after their first minute."""
        return self.fleet.condition("MetricsAvailable").get("status") == "True"

    def _has_grown(self) -> bool:
        return len(self.fleet.engines()) >= 2

    def _has_stalled(self) -> bool:
        """Return whether the replicas are too few and have not become more for a stage's shortest time."""
        now_s, engines = time.monotonic(), len(self.fleet.engines())
        if engines > self._engines:
            self._engines, self._grown_at_s = engines, now_s
        return engines < self.scenario.replicas and now_s - self._grown_at_s >= SURGE_MIN_S

    def _has_two_ready(self) -> bool:
        return self._ready() >= 2

    def _ready(self) -> int:
        return sum(pod.ready for pod in self.fleet.engines())

    def _has_settled(self) -> bool:
        """Return whether all replicas have been ready for a while."""
        if self._ready() < self.scenario.replicas:
            self._all_ready_since_s = None
            return False
        now_s = time.monotonic()
        self._all_ready_since_s = self._all_ready_since_s or now_s
        return now_s - self._all_ready_since_s >= SETTLED_S

    def _has_recovered(self) -> bool:
        """Return whether the frozen engine has ended."""
        return self.frozen is None or self.ended_at_s is not None

    def _unpin(self) -> None:
        self.fleet.unpin()
        self._note("removed spec.replicas: replicas follow the load from now on")

    # -- faults -------------------------------------------------------------------------------

    def _kill_operators(self) -> None:
        killed = self.stage.kill_operators(self.installation)
        self._killed = True
        self._note(f"kill -9 of {killed} operator processes")
        now_s = time.time()
        self.spans.append(Span(now_s, now_s + KILLED_S, FAULT, "operators killed"))

    def _freeze(self) -> None:
        ready = [pod for pod in self.fleet.engines() if pod.ready]
        self.frozen = ready[0]
        self.frozen_at_s = time.time()
        self.stage.freeze_engine(self.fleet, self.frozen)
        self._note(f"sent SIGSTOP to the engine in {self.frozen.name}")

    def _watch_frozen(self) -> None:
        if self.frozen is None or self.frozen_at_s is None or self.ended_at_s is not None:
            return
        same = [pod for pod in self.fleet.engines() if pod.identity == self.frozen.identity]
        now_s = time.time()
        if self.ejected_at_s is None and not any(pod.ready for pod in same):
            self.ejected_at_s = now_s
            self._note(f"{self.frozen.name} no longer receives requests", who="kubernetes")
        if not same:
            self.ended_at_s = now_s
            self._note(f"the engine in {self.frozen.name} ended", who="kubernetes")
            self.spans.append(Span(self.frozen_at_s, now_s, FAULT, "engine frozen"))

    def _stop_prometheus(self) -> None:
        if self.stage.stop_prometheus():
            self._prometheus_gone_at_s = time.time()
            self._note("Prometheus stopped")

    def _start_prometheus(self) -> None:
        if self._prometheus_gone_at_s is not None:
            self.stage.start_prometheus()
            span = Span(self._prometheus_gone_at_s, time.time(), FAULT, "Prometheus stopped")
            self._prometheus_gone_at_s = None
            self.spans.append(span)
            self._note("Prometheus started again")

    def _note(self, text: str, who: str = OURS) -> None:
        self.moments.append(Moment(time.time(), who, text))
