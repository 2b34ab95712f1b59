"""Load on a service: open-loop in a thread of its own, and the capacity from which its rate is chosen."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.load.client import CompletionClient, Outcome, Patience
from fleetkeeper_local.load.closed_loop import run_closed_loop
from fleetkeeper_local.load.open_loop import Sample, run_open_loop
from fleetkeeper_local.load.schedule import Arrival, Phase, Shape, plan_arrivals

CLIENTS = 16
"""Concurrent clients: more than a new engine's sequence limit, so that it is never idle."""
WARM_UP_S, MEASURED_S = 4.0, 12.0
SEED = 19
WITHOUT_TIER = {"": 1.0}


class Traffic:
    """Planned arrivals, sent at their times until all are sent or `stop` is called.

    A context manager: entering starts; leaving stops and waits for the requests in flight.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        arrivals: Sequence[Arrival],
        patience: Patience | None = None,
    ) -> None:
        """Prepare the load; `start` sends it.

        Args:
            base_url: of the API, ending in /v1.
            model: the name under which it is served.
            arrivals: in order of time.
            patience: how often the client retries; by default the client's own default.
        """
        self._base_url = base_url
        self._model = model
        self._arrivals = arrivals
        self._patience = patience
        self._stopped = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._failure: BaseException | None = None
        self.samples: list[Sample] = []
        """Requests that ended, in the order in which they ended."""
        self.sent = 0
        self.started_at_s = 0.0
        """By the wall clock."""

    def start(self) -> Self:
        """Start sending."""
        self.started_at_s = time.time()
        self._thread.start()
        return self

    def stop(self) -> list[Sample]:
        """Stop sending, wait for the requests in flight, and return all samples.

        Raises:
            Exception: an error of the generator itself; failed requests are samples.
        """
        self.end()
        return self.wait()

    def wait(self) -> list[Sample]:
        """Wait until everything planned was sent and has ended; return all samples."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self.samples

    @property
    def over(self) -> bool:
        """True once everything was sent and has ended."""
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        """Start sending."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop sending, and wait for the requests in flight."""
        self.end()
        self._thread.join()

    def end(self) -> None:
        """Stop sending; requests in flight continue."""
        self._stopped.set()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop just ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._send_all())
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            self._failure = error

    async def _send_all(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._stopped.is_set():  # before there was a loop
            self._stop.set()
        async with CompletionClient(self._base_url, self._model, patience=self._patience) as client:
            await run_open_loop(
                client.send,
                self._arrivals,
                on_send=self._count,
                on_sample=self.samples.append,
                stop=self._stop,
            )

    def _count(self) -> None:
        self.sent += 1


def joined(traffics: Sequence[Traffic]) -> list[Sample]:
    """Return all samples in order, their times in seconds after the first traffic started."""
    found = []
    for traffic in traffics:
        shift_s = traffic.started_at_s - traffics[0].started_at_s
        found += [
            replace(
                sample,
                intended_s=sample.intended_s + shift_s,
                sent_s=sample.sent_s + shift_s,
                ended_s=sample.ended_s + shift_s,
            )
            for sample in list(traffic.samples)
        ]
    return sorted(found, key=lambda sample: sample.intended_s)


def measure_capacity(
    base_url: str,
    model: str,
    shape: Shape,
    seconds: float = MEASURED_S,
    warm_up_s: float = WARM_UP_S,
) -> float:
    """Return the requests of this shape that are answered per second while more always wait.

    Raises:
        LocalError: no request was answered.
    """
    answered = asyncio.run(_saturate(base_url, model, shape, seconds, warm_up_s))
    if not answered:
        raise LocalError(f"{base_url} answered no request within {warm_up_s + seconds:.0f} s")
    return answered / seconds


async def _saturate(
    base_url: str, model: str, shape: Shape, seconds: float, warm_up_s: float
) -> int:
    loop = asyncio.get_running_loop()
    begin_s = loop.time() + warm_up_s
    plan = plan_arrivals([Phase("capacity", 600.0, 10.0)], replace(shape, tiers=WITHOUT_TIER), SEED)
    answered = 0

    def count(outcome: Outcome) -> None:
        nonlocal answered
        answered += outcome.ok and loop.time() >= begin_s

    async with CompletionClient(base_url, model, patience=Patience(attempts=20)) as client:
        await run_closed_loop(
            client.send,
            itertools.cycle(plan),
            CLIENTS,
            on_answer=count,
            seconds=warm_up_s + seconds,
        )
    return answered
