"""Our code in an engine that can be told, while it serves, to run without it.

Named to vLLM by `--scheduler-cls` and `--middleware`. Without it the scheduler is of the class that vLLM
would have chosen, and requests go past the middleware; the engine is the same process, with the same
memory under it. The scheduler's process keeps the clock, since a turn begins with a step of its own.
"""

# ruff: noqa: ANN401, SLF001 - vLLM's own types pass through; the clock of ours is set right
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
"""Words: the turn asked for and the one that runs, odd with our code; when the first began, how long all
took that are over, and the tokens of all."""


class Nothing:
    """In the place of ours: an object goes only from one class to another of like bases."""


def _words() -> memoryview:
    with Path(FILE).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """The scheduler of vLLM, with ours in front of it whenever that is wanted."""
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
            # Ours counts several times a second; turns without it must not make that more often.
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
    """The middleware, gone past while the scheduler runs without ours."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._past = app
        self._switch = _words()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handles one connection's scope."""
        if self._switch[ACTIVE] % 2:
            return super().__call__(scope, receive, send)
        return self._past(scope, receive, send)
