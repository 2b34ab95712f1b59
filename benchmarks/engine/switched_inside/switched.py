"""Our code in an engine that can be switched, while it serves, to run without it.

`--scheduler-cls` and `--middleware` name it to vLLM. Without our code, the scheduler has the class
that vLLM would have chosen, and requests bypass the middleware; the engine is the same process with
the same memory. The scheduler's process keeps the clock, since each turn begins with one of its
steps.
"""

# ruff: noqa: ANN401, SLF001 - vLLM's own types pass through; our clock is corrected
from __future__ import annotations

import mmap
import os
from collections.abc import Awaitable
from pathlib import Path
from time import monotonic_ns
from typing import Any

from fleetkeeper_engine.in_vllm.http.asgi import App, Receive, Scope, Send
from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware
from fleetkeeper_engine.in_vllm.scheduler import chosen_class, mixed_into

FILE = os.environ.get("FLEETKEEPER_BENCHMARK_SWITCH", "")
WANTED, ACTIVE, BEGAN, NS, TOKENS = range(5)
"""Words: the requested and the active turn (odd with our code); the start time of the first turn,
the total time of all completed turns, and the tokens of all turns."""


class Nothing:
    """A placeholder base for ours: an object can change only between classes with similar bases."""


def _words() -> memoryview:
    with Path(FILE).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """Return vLLM's scheduler, with ours in front of it whenever that is requested."""
    base = chosen_class(kwargs["vllm_config"] if "vllm_config" in kwargs else args[0])
    words = _words()
    sides: list[type[Any]] = []
    left_ns = 0

    def begin(made: Any, turn: int) -> None:
        nonlocal left_ns
        now, last = monotonic_ns(), words[ACTIVE]
        words[NS] = now - words[BEGAN]
        if turn % 2 < last % 2:
            left_ns = now
        elif turn % 2 > last % 2:
            # Ours counts several times a second; turns without it must not make it count more
            # often.
            made._live._count_due += (now - left_ns) / 1e9
        made.__class__ = sides[turn % 2]
        words[ACTIVE] = turn

    def switching(kind: type[Any]) -> type[Any]:
        class Switching(kind):  # type: ignore[misc] # the class vLLM chose
            def schedule(self, *args: Any, **kwargs: Any) -> Any:
                wanted = words[WANTED]
                if wanted != words[ACTIVE]:
                    begin(self, wanted)
                    return self.schedule(*args, **kwargs)
                return super().schedule(*args, **kwargs)

            def update_from_output(self, step: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
                words[TOKENS] += sum(map(len, output.sampled_token_ids or ()))
                return super().update_from_output(step, output, *args, **kwargs)

        return Switching

    without = type(f"Stock{base.__name__}", (Nothing, base), {})
    sides += [switching(without), switching(mixed_into(base))]
    words[WANTED] = words[ACTIVE] = 1
    words[BEGAN] = monotonic_ns()
    return sides[1](*args, **kwargs)


class Tiers(TierMiddleware):
    """The middleware, bypassed while the scheduler runs without ours."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._past = app
        self._switch = _words()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one connection's scope."""
        if self._switch[ACTIVE] % 2:
            return super().__call__(scope, receive, send)
        return self._past(scope, receive, send)
