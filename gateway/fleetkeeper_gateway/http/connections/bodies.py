"""Bodies of requests, each bounded in bytes and time, and bounded in total."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from typing import Final

from fleetkeeper_contract.bodies.outline import PART_BYTES
from fleetkeeper_contract.bodies.reader import BodyReader, JsonBody
from fleetkeeper_contract.bodies.refused import RefusedBodyError
from fleetkeeper_gateway.http.asgi import ClientGone, Receive
from fleetkeeper_gateway.http.connections.reading_turns import ReadingTurns
from fleetkeeper_gateway.http.errors import Refusal, unavailable
from fleetkeeper_gateway.http.request_fields import refusal_of

MIN_BYTES_PER_S: Final = 32 * 1024
"""Minimum rate of an upload: a body may take CLIENT_TIMEOUT_SECONDS plus its bytes at this rate."""
MAX_AT_ONCE: Final = 2000
"""Maximum commas and brackets (those in strings included) of a body that is parsed in one piece."""
_MAX_DISCARDED_BYTES = 64 * 1024**2
_MAX_DISCARD_S = 2.0


class BodyBudget:
    """The budget of bytes of all bodies that were read and not yet sent, and the turns in which they are parsed.

    An owner (a tenant, or a key of the batch API) may hold at most as many bytes as remain free: half of
    all if it is alone, less beside others. So a large or slow upload leaves room for other owners.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.held_bytes = 0
        self.turns = ReadingTurns()
        self._of_owners: dict[Hashable, int] = {}

    def take(self, owner: Hashable, size: int) -> None:
        """Reserve bytes for a body of an owner.

        Raises:
            Refusal: if the owner already holds too many.
        """
        own, held = self._of_owners.get(owner, 0) + size, self.held_bytes + size
        if own > self.total_bytes - held:
            raise unavailable(
                "bodies_full", "The gateway holds too many large requests. Try again soon.", 1
            )
        self._of_owners[owner], self.held_bytes = own, held

    def give_back(self, owner: Hashable, size: int) -> None:
        """Release bytes of a body."""
        self.held_bytes -= size
        self._of_owners[owner] -= size
        if not self._of_owners[owner]:
            del self._of_owners[owner]


class Body:
    """A request's body, from its first byte until the service answered."""

    __slots__ = (
        "_budget",
        "_held",
        "_max_bytes",
        "_owner",
        "_timeout_s",
        "data",
        "json",
        "more",
    )

    def __init__(self, budget: BodyBudget, max_bytes: int, timeout_s: float) -> None:
        self._budget = budget
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._held = 0
        self._owner: Hashable = ""
        self.data = b""
        """The whole body after `read`."""
        self.more = True
        """True while the client has more to send."""
        self.json: JsonBody | None = None
        """The parsed body if it was parsed in turns. Smaller bodies are parsed when they are needed."""

    @property
    def size(self) -> int:
        """Return the bytes that the body holds of the budget."""
        return self._held

    async def read(self, receive: Receive, announced: int | None, owner: Hashable) -> None:
        """Read the whole body.

        Args:
            receive: from the client.
            announced: the Content-Length; None if there is none.
            owner: the owner whose share of the budget the body uses.

        Raises:
            ClientGone: if the client closed the connection before the end.
            Refusal: if the body is too large or too slow, or the owner already holds too many bytes.
        """
        self._owner = owner
        if announced is not None:
            self._check_size(announced)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                data = await self._part(receive)
                if self.more or _takes_turns(data):
                    data = await self._rest(data, receive, deadline, loop.time() + self._timeout_s)
        except TimeoutError:
            raise Refusal(
                408,
                "body_too_slow",
                f"The body arrived too slowly: {self._held} bytes in {self._timeout_s:.0f} s or more.",
            ) from None
        except RefusedBodyError as error:
            raise refusal_of(error) from None
        self.data = data

    def release(self) -> None:
        """Release the bytes to the budget. Idempotent."""
        self.leave_budget()
        self.data = b""

    def leave_budget(self) -> None:
        """Release the bytes to the budget, but keep them: another budget has them now."""
        if self._held:
            self._budget.give_back(self._owner, self._held)
        self._held = 0
        self.json = None

    async def _part(self, receive: Receive) -> bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        self.more = message.get("more_body", False)
        size = self._held + len(part)
        self._check_size(size)
        if part:
            self._budget.take(self._owner, len(part))
        self._held = size
        return part

    async def _rest(
        self, first: bytes, receive: Receive, deadline: asyncio.Timeout, end: float
    ) -> bytes:
        # One buffer: a list of many small parts would take far more memory than their bytes.
        data, reader = bytearray(first), BodyReader()
        while self.more:
            if len(data) > PART_BYTES:
                await self._read_in_turns(reader, data, is_whole=False)
            deadline.reschedule(end + self._held / MIN_BYTES_PER_S)
            data += await self._part(receive)
        whole = bytes(data)
        del data
        if _takes_turns(whole):
            await self._read_in_turns(reader, whole, is_whole=True)
            self.json = reader.body
        return whole

    async def _read_in_turns(
        self, reader: BodyReader, data: bytes | bytearray, *, is_whole: bool
    ) -> None:
        """Parse the bytes that arrived. Other work on the event loop runs between two turns."""
        turns, may_go_on = self._budget.turns, True
        while may_go_on:
            await turns.take(self._owner)
            began = time.thread_time()
            try:
                may_go_on = reader.advance(data, is_whole=is_whole)
            finally:
                turns.give_back(time.thread_time() - began)
            if may_go_on:
                await asyncio.sleep(0)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise Refusal(
                413,
                "body_too_large",
                f"The body is larger than {self._max_bytes} bytes. Send less in one request.",
            )


def _takes_turns(data: bytes) -> bool:
    """Return whether a body is too large to be parsed in one piece."""
    if len(data) <= MAX_AT_ONCE:
        return False
    return len(data) > PART_BYTES or len(data) - len(data.translate(None, b"[{,")) > MAX_AT_ONCE


async def discard(receive: Receive) -> None:
    """Read the rest of a refused body without keeping it, for a short time.

    A client that still sends when its connection closes may not receive the refusal.
    """
    discarded = 0
    try:
        async with asyncio.timeout(_MAX_DISCARD_S):
            while discarded < _MAX_DISCARDED_BYTES:
                message = await receive()
                discarded += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
