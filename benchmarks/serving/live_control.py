"""Fleetkeeper's control loop for one engine without Kubernetes: the operator's own decisions."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

import requests

from fleetkeeper.adapters.engine import limits_body
from fleetkeeper.adapters.exposition import ContractLines, parse_text
from fleetkeeper.autoscale.constants import TICK_S
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.signals.series_map import edges_of
from fleetkeeper.autoscale.tick import decide_service
from fleetkeeper.autoscale.types import (
    ControlInputs,
    ControlSettings,
    LimitsRequest,
    PodView,
    PutOutcome,
)
from tests.support.supervised_engine import RunningEngine

POD = "engine-0"


class LiveControl:
    """A thread that reads the engine's metrics every tick, decides, and sends limits requests.

    It is the operator's loop without a cluster: same decisions, same requests, one replica.
    """

    def __init__(self, engine: RunningEngine, settings: ControlSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._started = time.time()
        self._memory = ControlMemory()
        self._outcomes: tuple[PutOutcome, ...] = ()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._failure: Exception | None = None
        self.decisions: list[tuple[float, ControlDecision]] = []
        """Every decision with its time by time.time."""

    def __enter__(self) -> Self:
        """Start the loop."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the loop; raise what ended it."""
        self._over.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._over.wait(TICK_S):
                self._tick(time.time())
        except Exception as error:  # noqa: BLE001 - raised again when the block is left
            self._failure = error

    def _tick(self, now: float) -> None:
        pod = PodView(POD, self._engine.uid, self._started, True, self._started, ip="127.0.0.1")
        sample = self._sample(now)
        inputs = ControlInputs(
            namespace="benchmark",
            name="serving",
            settings=self._settings,
            replicas=1,
            started=self._started,
            pods=(pod,),
            samples=() if sample is None else (sample,),
            put_outcomes=self._outcomes,
        )
        decision, self._memory = decide_service(inputs, self._memory, now)
        self._outcomes = tuple(self._put(request) for request in decision.puts)
        self.decisions.append((now, decision))

    def _sample(self, now: float) -> PodSample | None:
        try:
            answer = self._engine.session.get(f"{self._engine.control_url}/metrics", timeout=2)
        except requests.RequestException:
            return None  # as for the operator: no sample in this tick
        lines = ContractLines()
        lines.feed(answer.content)
        return parse_text(POD, now, lines.text(), edges_of(self._settings))

    def _put(self, request: LimitsRequest) -> PutOutcome:
        token = self._engine.signer.token(request.uid)
        body: dict[str, Any] = limits_body(request)
        try:
            answer = self._engine.limits("PUT", token, body)
        except requests.RequestException as error:
            return PutOutcome(request.pod, request.generation, False, detail=str(error))
        done = answer.status_code == 200
        return PutOutcome(request.pod, request.generation, done, detail="" if done else answer.text)
