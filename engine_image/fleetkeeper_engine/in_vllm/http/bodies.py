"""Request bodies from the wire: bounded in bytes and time; large ones are outlined part by part."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from fleetkeeper_contract.bodies.outline import PART_BYTES
from fleetkeeper_contract.bodies.reader import BodyReader, JsonBody, read_body
from fleetkeeper_contract.bodies.refused import RefusedBodyError
from fleetkeeper_engine.in_vllm.http.asgi import ClientGone, Message, Receive

MIB: Final = 1024**2
_GRACE_S = 10.0
_MIN_BYTES_PER_S = 32 * 1024
_MAX_RECEIVE_S = 120.0
_MAX_DISCARDED_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Maximum bytes that the middleware buffers."""

    request_bytes: int = 32 * MIB
    tokenizer_bytes: int = 4 * MIB
    """For a request that the API server's own processor works on."""
    total_bytes: int = 128 * MIB
    """For all requests that are being received or wait. A quarter is kept for small ones."""


class BodyBudget:
    """The bytes of all buffered bodies, and the bodies that are being received."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.max_small = limits.total_bytes
        self.max_large = limits.total_bytes * 3 // 4
        self.held = 0
        self.receiving: set[Intake] = set()

    def abort_slow(self, now: float) -> None:
        """Abort the bodies that arrive too slowly; each request is answered 408."""
        for intake in list(self.receiving):
            intake.abort_if_slow(now)


class Intake:
    """One body, from its first byte until it is handed on. Until then it counts against the budget."""

    __slots__ = (
        "_budget",
        "_is_aborted",
        "_max_bytes",
        "_more",
        "_size",
        "_started",
        "_task",
        "body",
    )

    def __init__(self, budget: BodyBudget, max_bytes: int, now: float) -> None:
        self._budget = budget
        self._max_bytes = max_bytes
        self._started = now
        self._size = 0
        self._is_aborted = False
        self._more = True
        self._task: asyncio.Task[object] | None = None
        self.body = b""
        """The whole body, once it was read."""

    async def read(self, receive: Receive, declared: bytes | None) -> JsonBody:
        """Return the whole body, and keep its bytes.

        Args:
            receive: the client's side.
            declared: the header Content-Length.

        Raises:
            ClientGone: if the client hung up before the end.
            RefusedBodyError: if the body is too large, too slow, not JSON or beyond a bound, or if
                too many bytes are buffered already.
        """
        self._task = asyncio.current_task()
        self._budget.receiving.add(self)
        try:
            if declared is not None and declared.isdigit() and len(declared) < 20:
                self._check_size(int(declared))
            self.body = self._add(await receive())
            if self._more or self._size > PART_BYTES:
                return await self._read_rest(receive)
            return read_body(self.body)
        except RefusedBodyError:
            self.release()
            await self._discard(receive)
            raise
        except asyncio.CancelledError:
            self._clear_abort()
            raise RefusedBodyError(
                408, "body_too_slow", f"The body arrived too slowly: {self._size} bytes so far."
            ) from None
        finally:
            self._budget.receiving.discard(self)

    def release(self) -> None:
        """Release the body's bytes. Idempotent."""
        self._budget.held -= self._size
        self._size = 0
        self.body = b""

    def abort_if_slow(self, now: float) -> None:
        """Cancel the read if it takes longer than its size allows."""
        allowed_s = min(_MAX_RECEIVE_S, _GRACE_S + self._size / _MIN_BYTES_PER_S)
        if self._task is not None and not self._is_aborted and now - self._started > allowed_s:
            self._is_aborted = True
            self._task.cancel()

    async def _discard(self, receive: Receive) -> None:
        """Read the rest without keeping it: a client that still sends would not read the refusal."""
        discarded = 0
        try:
            while self._more and discarded <= _MAX_DISCARDED_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                discarded += len(message.get("body", b""))
                self._more = message.get("more_body", False)
        except asyncio.CancelledError:
            self._clear_abort()

    def _clear_abort(self) -> None:
        """Clear a cancellation by `abort_if_slow`; raise any other one again."""
        if not self._is_aborted or self._task is None:
            raise asyncio.CancelledError
        self._task.uncancel()

    async def _read_rest(self, receive: Receive) -> JsonBody:
        # One buffer: a list of many small parts would take far more memory than their bytes.
        data, reader = bytearray(self.body), BodyReader()
        while self._more:
            data += self._add(await receive())
            if len(data) > PART_BYTES:
                await _read_in_turns(reader, data, is_whole=False)
        self.body = bytes(data)
        del data
        if len(self.body) > PART_BYTES:
            await _read_in_turns(reader, self.body, is_whole=True)
        return reader.body or read_body(self.body)

    def _add(self, message: Message) -> bytes:
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        self._more = message.get("more_body", False)
        budget = self._budget
        size = self._size + len(part)
        max_bytes = budget.max_small if size <= PART_BYTES else budget.max_large
        if size > self._max_bytes or budget.held + len(part) > max_bytes:
            self._check_size(size)
            raise RefusedBodyError(
                429, "bodies_full", "This replica holds too many large requests. Try again soon."
            )
        self._size = size
        budget.held += len(part)
        return part

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise RefusedBodyError(
                413,
                "body_too_large",
                f"The body is larger than {self._max_bytes} bytes. Send less in one request.",
            )


async def _read_in_turns(reader: BodyReader, data: bytes | bytearray, *, is_whole: bool) -> None:
    """Read what arrived. Other work on the event loop runs between two turns."""
    while reader.advance(data, is_whole=is_whole):  # noqa: ASYNC110 - it reads, and waits for nothing
        await asyncio.sleep(0)
