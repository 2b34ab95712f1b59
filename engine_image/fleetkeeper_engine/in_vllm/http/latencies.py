"""TTFT and ITL of streamed answers, counted as their frames leave vLLM.

A frame is one server-sent event. Only frames that carry tokens count: vLLM sends others (the role,
the usage, the end) in the same moment as a token, which would show as gaps of 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from fleetkeeper_contract.histogram_buckets import (
    INTER_TOKEN_LATENCY_EDGES_S,
    TIME_TO_FIRST_TOKEN_EDGES_S,
)
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.asgi import Message, first_headers
from fleetkeeper_engine.shm.layout import MIDDLEWARE, Cells

_FIRST, _FIRST_SUM, _GAP, _GAP_SUM = (
    MIDDLEWARE.cells[name]
    for name in (
        "time_to_first_token_buckets",
        "time_to_first_token_sum",
        "inter_token_latency_buckets",
        "inter_token_latency_sum",
    )
)
_FIRST_WIDTH = len(TIME_TO_FIRST_TOKEN_EDGES_S) + 1
_GAP_WIDTH = len(INTER_TOKEN_LATENCY_EDGES_S) + 1
_EVENTS = b"text/event-stream"


class Stream(NamedTuple):
    """The frames of a route. Quotes and line ends inside a JSON text are escaped, so no text matches."""

    content: bytes
    """Part of every frame that carries tokens, and of no other, except for `preface`."""
    preface: bytes | None = None
    """Part of the frames that precede the first token."""


_CHOICE = b'"choices":[{'
_STREAMS = {
    "/v1/completions": Stream(_CHOICE),
    "/v1/chat/completions": Stream(_CHOICE, b'"delta":{"role":'),
    # The first line of an event is its type: `event: response.output_text.delta`.
    "/v1/responses": Stream(b".delta\n"),
}


def stream_of(path: str) -> Stream | None:
    """Return the frames of a route; None if it streams no tokens."""
    return _STREAMS.get(path)


def is_stream(start: Message) -> bool:
    """Return whether an answer that starts so is a successful stream of events."""
    kind = first_headers(start).get(b"content-type", b"")
    return start["status"] == 200 and kind.startswith(_EVENTS)


class LatencyRecord:
    """The histograms in the middleware's block."""

    def __init__(self, cells: Cells) -> None:
        self._whole = cells.whole
        self._real = cells.real

    def add_first(self, tier: Tier, seconds: float) -> None:
        """Count a time to first token."""
        place = tier * _FIRST_WIDTH + bisect_left(TIME_TO_FIRST_TOKEN_EDGES_S, seconds)
        self._whole[_FIRST + place] += 1
        self._real[_FIRST_SUM + tier] += seconds

    def add_gap(self, tier: Tier, seconds: float) -> None:
        """Count the time between two frames."""
        place = tier * _GAP_WIDTH + bisect_left(INTER_TOKEN_LATENCY_EDGES_S, seconds)
        self._whole[_GAP + place] += 1
        self._real[_GAP_SUM + tier] += seconds


class StreamTimer:
    """The timer of one streamed answer.

    It reads the clock once for each frame that carries tokens. `gaps` is False for a request with
    several sequences: their frames interleave, so the time between two is not the wait for a token.
    """

    __slots__ = ("_arrived", "_clock", "_content", "_gaps", "_last", "_preface", "_record", "_tier")

    def __init__(
        self,
        record: LatencyRecord,
        tier: Tier,
        arrived: float,
        stream: Stream,
        clock: Callable[[], float],
        *,
        gaps: bool,
    ) -> None:
        self._record = record
        self._tier = tier
        self._arrived = arrived
        self._content, self._preface = stream
        self._clock = clock
        self._gaps = gaps
        self._last: float | None = None

    def frame(self, body: bytes) -> None:
        """Count a frame that vLLM sends now."""
        if self._content not in body:
            return
        last = self._last
        if last is None:
            if self._preface is not None and self._preface in body:
                return
            self._last = now = self._clock()
            self._record.add_first(self._tier, max(0.0, now - self._arrived))
        elif self._gaps:
            self._last = now = self._clock()
            self._record.add_gap(self._tier, now - last)
