"""Timing inside the processes of a measured engine: the CPU time that our code takes.

Python imports a module of this name at start-up. Every entry into our code is timed with the
thread's CPU clock, which stops while other threads have the core. The time that vLLM's application
and server take on our behalf is subtracted. Sums go to shared memory. The clock includes its own
cost; with EMPTY it surrounds nothing and so measures that cost.
"""

# ruff: noqa: ANN401, PLC0415 - vLLM's own types pass through; only engine processes can import them
from __future__ import annotations

import mmap
import os
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from pathlib import Path
from time import thread_time_ns
from typing import Any

FILE = os.environ.get("FLEETKEEPER_BENCHMARK_ACCOUNT")
EMPTY = bool(os.environ.get("FLEETKEEPER_BENCHMARK_ACCOUNT_EMPTY"))
"""Whether our code does nothing: the scheduler is left unchanged, requests are passed on."""
ENTRIES = (
    "before_schedule",
    "after_schedule",
    "while_running",
    "after_update",
    "request",
    "publish",
    "tick",
)
"""The timed entries; each has a counter of its calls and one of its nanoseconds."""


class Account:
    """The time during one request that is not ours."""

    def __init__(self) -> None:
        self.others_ns = 0
        self.depth = 0


OF_REQUEST: ContextVar[Account | None] = ContextVar("account", default=None)


class Timed:
    """An awaitable of which every run between two waits is timed."""

    def __init__(self, inner: Awaitable[Any], spent: Callable[[int], None]) -> None:
        self._inner = inner.__await__()
        self._spent = spent

    def __await__(self) -> Generator[Any, Any, Any]:
        """Run the awaitable as `await` does."""
        sent, thrown = None, None
        while True:
            began = thread_time_ns()
            try:
                waits_for = self._inner.send(sent) if thrown is None else self._inner.throw(thrown)
            except StopIteration as end:
                return end.value
            finally:
                self._spent(thread_time_ns() - began)
            sent, thrown = None, None
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001 - passed to the timed awaitable
                thrown = error


def other(made: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap other code that ours calls, so that its time is not ours; nested calls count once."""

    def call(*args: Any) -> Awaitable[Any]:
        account = OF_REQUEST.get()
        if account is None or account.depth:
            return made(*args)
        account.depth += 1
        return Timed(_once(made(*args), account), lambda ns: _add(account, ns))

    return call


async def _once(inner: Awaitable[Any], account: Account) -> Any:
    try:
        return await inner
    finally:
        account.depth -= 1


def _add(account: Account, ns: int) -> None:
    account.others_ns += ns


def _nothing(*_: Any) -> None:
    return


async def _pass_on(middleware: Any, scope: Any, receive: Any, send: Any) -> None:
    await middleware._app(scope, receive, send)  # noqa: SLF001 - replaces its own code


def main(file: Path) -> None:
    """Put a clock around every call of our code."""
    with file.open("r+b") as opened:
        words = memoryview(mmap.mmap(opened.fileno(), 0)).cast("Q")

    def book(entry: str, ns: int) -> None:
        place = 2 * ENTRIES.index(entry)
        words[place] += 1
        words[place + 1] += ns

    def wrap(kind: type[Any], name: str, entry: str) -> None:
        ours = _nothing if EMPTY else getattr(kind, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = thread_time_ns()
            try:
                return ours(*args, **kwargs)
            finally:
                book(entry, thread_time_ns() - began)

        setattr(kind, name, timed)

    from fleetkeeper_engine.in_vllm.http.admission.queue import Admission
    from fleetkeeper_engine.in_vllm.http.dispatcher import Dispatcher
    from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware
    from fleetkeeper_engine.in_vllm.live_scheduling import LiveScheduling

    for name in ENTRIES[:4]:
        wrap(LiveScheduling, name, name)
    wrap(Dispatcher, "_publish", "publish")
    wrap(Admission, "tick", "tick")

    made = TierMiddleware.__init__
    handled = _pass_on if EMPTY else TierMiddleware.__call__

    def make(self: Any, app: Any, *args: Any, **kwargs: Any) -> None:
        made(self, other(app), *args, **kwargs)

    async def handle(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await handled(self, scope, receive, send)
            return
        account, total = Account(), [0]
        OF_REQUEST.set(account)

        def spent(ns: int) -> None:
            total[0] += ns

        try:
            await Timed(handled(self, scope, other(receive), other(send)), spent)
        finally:
            OF_REQUEST.set(None)
            book("request", total[0] - account.others_ns)

    TierMiddleware.__init__ = make  # type: ignore[method-assign]
    TierMiddleware.__call__ = handle  # type: ignore[method-assign]


if FILE:
    main(Path(FILE))
