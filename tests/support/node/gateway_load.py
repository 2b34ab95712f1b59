"""Load through the gateway on the local node, that counts what its answers told.

It measures no times, unlike `fleetkeeper_local.load`: its answers have the prompt tokens that usage counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from fleetkeeper_local.demo.front_door import Answer, FrontDoor
from tests.support.node.node_world import until

MORE = 8
"""Answers that show that requests are served after a fault."""


class SteadyLoad:
    """Two clients that send one request after another, and remember each answer.

    Leaving the block waits for the requests in flight.
    """

    def __init__(self, door: FrontDoor, key: str, model: str, url: str = "") -> None:
        self._send: Callable[[], Answer] = lambda: door.complete(key, model, url=url)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(2)]
        self.answers: list[Answer] = []
        self.failures: list[str] = []

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                answer = self._send()
            except OSError as error:  # refused, or broken in the middle
                self.failures.append(repr(error))
                continue
            self.answers.append(answer)
            if answer.status != 200:
                self.failures.append(f"status {answer.status}: {answer.body}")

    def await_more(self, what: str) -> None:
        """Return when several more requests were answered."""
        seen = len(self.answers)
        until(lambda: len(self.answers) >= seen + MORE, f"answers {what}")

    def told(self) -> tuple[int, int, int]:
        """Return the requests, and the prompt and answer tokens that the answers told."""
        tokens = [answer.tokens for answer in self.answers if answer.status == 200]
        return len(tokens), sum(prompt for prompt, _ in tokens), sum(count for _, count in tokens)

    def __enter__(self) -> Self:
        """Start sending."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop sending."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
