"""`fleetkeeper-gateway batch`, whose worker processes end when they handle an answer with a mark.

It stands for an answer that ends its reader: by its size, or by a defect of a library. SIGKILL ends the process at
once, so nothing that it could still write takes part.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from fleetkeeper_gateway.batch.interfaces import Answer
from fleetkeeper_gateway.batch.workers.handling import Handling
from fleetkeeper_gateway.cli import main

POISON: Final = "this-answer-ends-its-reader"
"""Of a body's `poison`, which batch_engine puts into its answer."""
COMMAND: Final = (sys.executable, __file__, "batch")


class Body:
    """The body of an answer. Whoever reads a marked one between the marks of its handling ends."""

    def __init__(self, stored: Any) -> None:
        self.stored = stored
        self.handled = False

    def __get__(self, answer: Answer | None, kind: type[Answer]) -> Any:
        """Return the body."""
        body = self.stored.__get__(answer, kind)
        if self.handled and POISON.encode() in body:
            os.kill(os.getpid(), signal.SIGKILL)
        return body

    def __set__(self, answer: Answer, body: bytes) -> None:
        """Set the body."""
        self.stored.__set__(answer, body)


def take_poison() -> None:
    """Let marked answers end this process."""
    body, original = Body(Answer.__dict__["body"]), Handling.__call__

    @contextmanager
    def handling(self: Handling, batch_id: str, line: int) -> Iterator[None]:
        with original(self, batch_id, line):
            body.handled = True
            try:
                yield
            finally:
                body.handled = False

    setattr(Answer, "body", body)  # noqa: B010 - it has a type of its own
    setattr(Handling, "__call__", handling)  # noqa: B010 - the same


if __name__ == "__mp_main__":  # a process that the program below has started
    take_poison()

if __name__ == "__main__":
    main()
