"""The output processor of a simulated engine: from the counts of a step to texts, with vLLM's names.

The hooks that count usage (`in_vllm.usage.hooks`) follow these methods as they follow vLLM's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fleetkeeper_engine.simulated.core import Prefill, SequenceOutput
from fleetkeeper_engine.simulated.series import Series
from fleetkeeper_engine.simulated.tokens import TEXTS, Text


class StopSearch:
    """The text of one answer, searched as it grows for stop texts, also for one that spans tokens."""

    def __init__(self, stops: tuple[str, ...], *, keeps: bool) -> None:
        self._stops = stops
        self._keeps = keeps
        self._held = ""
        """Text in which a stop text may have begun, which is therefore not sent yet."""
        self._longest = max(map(len, stops))

    def add(self, text: str) -> tuple[str, str | None]:
        """Return what can be sent now, and the stop text that ended the answer."""
        whole = self._held + text
        places = [(at, stop) for stop in self._stops if (at := whole.find(stop)) >= 0]
        if places:
            at, stop = min(places)
            self._held = ""
            return whole[: at + len(stop) * self._keeps], stop
        kept = min(len(whole), self._longest - 1)
        self._held = whole[len(whole) - kept :]
        return whole[: len(whole) - kept], None

    def rest(self) -> str:
        """Return what was not sent when the answer ended by itself."""
        held, self._held = self._held, ""
        return held


class EngineDeadError(Exception):
    """EngineCore has ended."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a request."""

    lora_name: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of one sequence."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """Texts that end it."""
    keeps_stop: bool = False
    interval: int = 1
    streams: bool = False


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """A sequence for the engine."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    text: Text
    arrival_s: float
    priority: int = 0
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class EngineCoreOutput:
    """The output of a step for one sequence."""

    request_id: str
    new_token_ids: Sequence[int]
    finish_reason: str | None
    prefill_stats: Prefill | None


@dataclass(slots=True)
class Answer:
    """The output of a sequence since it was last read."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Indices into `tokens.TOKENS`."""
    finish_reason: str | None = None
    stop_reason: str | None = None
    cached_tokens: int = 0


class Collector:
    """The answers to one request, one place per sequence; a reader waits for the next of any."""

    def __init__(self) -> None:
        self._ready: dict[int, Answer] = {}
        self._event = asyncio.Event()
        self._error: Exception | None = None

    def put(self, index: int, answer: Answer) -> None:
        """Add to what the reader gets next."""
        known = self._ready.get(index)
        if known is None:
            self._ready[index] = answer
        else:
            known.text += answer.text
            known.tokens += answer.tokens
            known.finish_reason, known.stop_reason = answer.finish_reason, answer.stop_reason
        self._event.set()

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self._error = error
        self._event.set()

    async def take(self) -> dict[int, Answer]:
        """Return what is new, by sequence.

        Raises:
            EngineDeadError: if the engine has ended.
        """
        await self._event.wait()
        self._event.clear()
        if self._error is not None:
            raise self._error
        found, self._ready = self._ready, {}
        return found


@dataclass(slots=True)
class RequestState:
    """A sequence that the engine generates."""

    request: EngineCoreRequest
    index: int
    queue: Collector
    is_prefilling: bool = True
    generated: int = 0
    unsent: list[int] = field(default_factory=list)
    unsent_text: str = ""
    has_sent: bool = False
    cached_tokens: int = 0
    last_token_s: float = 0.0
    search: StopSearch | None = None

    def __post_init__(self) -> None:
        """Search for stop texts if there are any."""
        sampling = self.request.sampling
        if sampling.stop:
            self.search = StopSearch(sampling.stop, keeps=sampling.keeps_stop)

    @property
    def is_due(self) -> bool:
        """Return whether a stream gets a frame before the sequence ends."""
        sampling = self.request.sampling
        return sampling.streams and (not self.has_sent or len(self.unsent) >= sampling.interval)

    def answer(self, finish_reason: str | None, stop_reason: str | None) -> Answer:
        """Return what was not sent yet."""
        found = Answer(
            self.unsent_text, self.unsent, finish_reason, stop_reason, self.cached_tokens
        )
        self.unsent, self.unsent_text, self.has_sent = [], "", True
        return found

    @property
    def request_id(self) -> str:
        """Return the ID of the sequence."""
        return self.request.request_id


class OutputProcessor:
    """All sequences in the engine, by ID."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._states)

    def add_request(self, request: EngineCoreRequest, index: int, queue: Collector) -> None:
        """Expect the outputs of a sequence."""
        self._states[request.request_id] = RequestState(request, index, queue)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Forget sequences; return the IDs of those that were expected."""
        return [name for name in request_ids if self._states.pop(name, None) is not None]

    def propagate_error(self, error: Exception) -> None:
        """Fail every request: the engine has ended."""
        for state in self._states.values():
            state.queue.fail(error)
        self._states.clear()

    def process_outputs(self, outputs: Iterable[SequenceOutput], now: float) -> list[str]:
        """Take the outputs of one step; return sequences that a stop text has ended."""
        stopped = []
        tokens = 0
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            tokens += output.new_token_count + (
                output.prefill.num_prompt_tokens if output.prefill else 0
            )
            if self._take(state, output, now):
                stopped.append(output.request_id)
        self._series.stepped(tokens)
        return stopped

    def _take(self, state: RequestState, output: SequenceOutput, now: float) -> bool:
        """Handle one output. Return True if the engine must end the sequence."""
        new = state.request.text.take(output.new_token_count)
        full = EngineCoreOutput(output.request_id, new, output.finished_reason, output.prefill)
        self._update_stats_from_output(state, full, now)
        state.is_prefilling = False
        state.unsent += new
        text, reason, stop = "".join([TEXTS[index] for index in new]), full.finish_reason, None
        if state.search is not None:
            if state.generated > state.request.sampling.min_tokens:
                text, stop = state.search.add(text)
            if reason is not None and stop is None:
                text += state.search.rest()
        state.unsent_text += text
        if stop is not None:
            reason = "stop"
        if reason is not None or state.is_due:
            state.queue.put(state.index, state.answer(reason, stop))
        if reason is not None:
            self._finish_request(state)
            self._series.ended(state.request, reason, state.generated, now)
        return stop is not None and full.finish_reason is None

    def _update_stats_from_output(
        self, state: RequestState, output: EngineCoreOutput, now: float
    ) -> None:
        prefill = output.prefill_stats if state.is_prefilling else None
        if prefill is not None:
            state.cached_tokens = prefill.num_cached_tokens
            self._series.prefilled(prefill, now - state.request.arrival_s)
        elif output.new_token_ids:
            self._series.followed(now - state.last_token_s)
        state.last_token_s = now
        state.generated += len(output.new_token_ids)
        self._series.generation_tokens += len(output.new_token_ids)

    def _finish_request(self, state: RequestState) -> None:
        self._states.pop(state.request_id, None)
