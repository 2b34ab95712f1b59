"""The scheduler of a simulated engine, with the names of vLLM's that `in_vllm` reads or wraps.

Requests start in the order of their priority, then of their arrival, and the last in that order is
preempted first. The steps themselves are those of `fleetkeeper simulate`. They differ from vLLM's in two
ways. A sequence holds the blocks of its whole prompt from its start. And every decoding sequence gets its
token before prefills do, where vLLM serves running sequences in the order of their start.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fleetkeeper_engine.simulated.config import SimulatedConfig
from fleetkeeper_engine.simulated.core import Prefill, SequenceOutput, StepOutputs, Work
from fleetkeeper_engine.simulated.prefix_cache import PrefixCache, block_hashes
from fleetkeeper_steps.costs import StepCosts
from fleetkeeper_steps.running import (
    BLOCK_TOKENS,
    DecodeSteps,
    PrefillStep,
    RunningSequence,
    RunningSequences,
    blocks_of,
)


@dataclass(slots=True, eq=False)
class Request:
    """A request in the scheduler. `row`: its running sequence."""

    request_id: str
    priority: int
    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    to_prefill: int
    to_generate: int
    finish_reason: str
    decoded: SequenceOutput
    """The output of each step while it decodes: one shared value for all steps."""
    block_hashes: Sequence[int] = ()
    lora_name: str | None = None
    num_cached_tokens: int = -1
    """Cached tokens at its first start; -1 before."""
    num_preemptions: int = 0
    has_first_token: bool = False
    row: RunningSequence[Request] | None = None

    @classmethod
    def of(cls, work: Work, *, finds_prefixes: bool) -> Request:
        """Return the request for this work."""
        prompt = work.prompt
        count = prompt if isinstance(prompt, int) else len(prompt)
        hashes: Sequence[int] = ()
        if finds_prefixes and not isinstance(prompt, int):
            hashes = block_hashes(prompt, work.lora_name)
        ends = work.ends_after
        stops = work.max_tokens == 0 or (ends is not None and ends <= work.max_tokens)
        return cls(
            work.request_id,
            work.priority,
            work.arrival_s or 0.0,
            count,
            work.max_tokens,
            to_prefill=count,
            to_generate=work.tokens_to_generate,
            finish_reason="stop" if stops else "length",
            decoded=SequenceOutput(work.request_id, 1),
            block_hashes=hashes,
            lora_name=work.lora_name,
        )

    def __lt__(self, other: Request) -> bool:
        """Return whether this request goes first."""
        ours = (self.priority, self.arrival_time, self.request_id)
        return ours < (other.priority, other.arrival_time, other.request_id)

    def first_output(self) -> SequenceOutput:
        """Return the output of the step that ended its prefill, which may be one after a preemption."""
        prefill = None
        if not self.has_first_token:
            prefill = Prefill(self.num_prompt_tokens, self.num_cached_tokens)
            self.has_first_token = True
        reason = self.finish_reason if self.row is None else None
        return SequenceOutput(self.request_id, int(self.max_tokens > 0), reason, prefill)

    def next_output(self) -> SequenceOutput:
        """Return the output of a step in which it decoded."""
        if self.row is not None:
            return self.decoded
        return SequenceOutput(self.request_id, 1, self.finish_reason)


class WaitingQueue:
    """Waiting requests; iteration is in their order."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add_request(self, request: Request) -> None:
        """Add a request."""
        heapq.heappush(self._heap, request)

    def peek_request(self) -> Request:
        """Return the first request."""
        return self._heap[0]

    def pop_request(self) -> Request:
        """Remove and return the first request."""
        return heapq.heappop(self._heap)

    def remove_request(self, request: Request) -> None:
        """Remove any request."""
        self._heap.remove(request)
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in their order, each only when it is asked for."""
        heap = self._heap[:]
        while heap:
            yield heapq.heappop(heap)


@dataclass(slots=True)
class KVCacheManager:
    """The blocks of the KV cache."""

    sequences: RunningSequences[Request]

    @property
    def usage(self) -> float:
        """The share of the blocks that running sequences hold."""
        return self.sequences.blocks_used / self.sequences.blocks


class NewRequest(NamedTuple):
    """A request that starts in a step."""

    req_id: str


@dataclass(slots=True, eq=False)
class SchedulerOutput:
    """A step for the workers."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    plan: PrefillStep | DecodeSteps | None = None

    @property
    def seconds(self) -> float:
        """The time that it takes."""
        return 0.0 if self.plan is None else self.plan.seconds


class SimulatedScheduler:
    """The scheduler. Blocks have 16 tokens, also if the configuration names another size."""

    def __init__(self, vllm_config: SimulatedConfig, **_: Any) -> None:  # noqa: ANN401 - vLLM's other arguments
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        self.scheduler_config = scheduler
        self.cache_config = cache
        self.max_num_running_reqs = scheduler.max_num_seqs
        self.max_num_active_reqs = scheduler.max_num_seqs
        self.max_num_scheduled_tokens = scheduler.max_num_batched_tokens
        self.num_spec_tokens = 0
        self.num_preemptions = 0
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self.requests: dict[str, Request] = {}
        self.finished_req_ids: set[str] = set()
        """Ended since the last step. vLLM's workers get them with the next one."""
        costs = StepCosts(*(cost / vllm_config.speed for cost in vllm_config.costs))
        blocks = cache.kv_cache_size_tokens // BLOCK_TOKENS
        self._sequences: RunningSequences[Request] = RunningSequences(costs, blocks, rank=_itself)
        self.kv_cache_manager = KVCacheManager(self._sequences)
        self._prefixes = PrefixCache(blocks)

    # -- requests -----------------------------------------------------------------------------------

    def add_request(self, work: Work) -> None:
        """Queue a request."""
        request = Request.of(work, finds_prefixes=self.cache_config.enable_prefix_caching)
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_requests(
        self,
        request_ids: Iterable[str],
        finished_status: object,  # noqa: ARG002 - as vLLM's
    ) -> list[Request]:
        """End requests that are not ended, and return them. Call it between two steps."""
        found = [self.requests.pop(name) for name in request_ids if name in self.requests]
        for request in found:
            self.finished_req_ids.add(request.request_id)
            if request.row is None:
                self.waiting.remove_request(request)
            else:
                self._sequences.remove(request.row)
                self.running.remove(request)
                request.row = None
        return found

    def has_unfinished_requests(self) -> bool:
        """Return whether a request runs or waits."""
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Return whether there is anything to schedule, if only the end of requests."""
        return bool(self.requests or self.finished_req_ids)

    # -- steps --------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step."""
        self.finished_req_ids.clear()
        sequences = self._sequences
        are_others = len(self.requests) > 1
        sequences.max_chunk = self.scheduler_config.long_prefill_token_threshold * are_others
        new = self._start_waiting()
        assert len(self.running) <= self.max_num_running_reqs  # noqa: S101 - as in vLLM
        plan = self._plan(len(new))
        if plan is None:
            return SchedulerOutput()
        scheduled = {row.request.request_id: 1 for row in sequences.decoding.values()}
        tokens = len(scheduled)
        if isinstance(plan, PrefillStep):
            rows = sequences.prefilling[: plan.sequences - tokens]
            tokens += plan.tokens
            scheduled.update({row.request.request_id: row.chunk for row in rows})
        return SchedulerOutput(scheduled, tokens, new, plan)

    def get_grammar_bitmask(self, _: SchedulerOutput) -> None:
        """Return nothing. vLLM asks for it while the workers compute, which our mixin uses."""

    def update_from_output(self, step: SchedulerOutput, _: object) -> dict[int, StepOutputs]:
        """End a step, and return what it gave each request of the only API server."""
        decoding = [row.request for row in self._sequences.decoding.values()]
        first: list[Request] = []
        if isinstance(step.plan, PrefillStep):
            first, ended = self._sequences.end_prefill(step.plan)
        elif step.plan is not None:
            ended = self._sequences.end_decodes(step.plan)
        else:
            return {}
        if ended:
            self._forget(ended)
        for request in first:
            self._prefixes.add(request.block_hashes)
        outputs = [request.next_output() for request in decoding]
        outputs += [request.first_output() for request in first]
        return {0: StepOutputs(outputs)}

    def _start_waiting(self) -> list[NewRequest]:
        new: list[NewRequest] = []
        sequences = self._sequences
        budget = sequences.tokens_left(self.max_num_scheduled_tokens)
        free = sequences.free_blocks()
        while self.waiting and len(self.running) < self.max_num_active_reqs and budget > 0:
            request = self.waiting.peek_request()
            free -= blocks_of(request.to_prefill)
            cached = self._prefixes.cached_tokens(request.block_hashes)
            chunk = request.to_prefill - cached
            if 0 < sequences.max_chunk < chunk:
                chunk = sequences.max_chunk
            if free < 0 or (chunk > budget and not self.scheduler_config.enable_chunked_prefill):
                break
            self.running.append(self.waiting.pop_request())
            request.row = sequences.start(request, cached)
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = cached
            new.append(NewRequest(request.request_id))
            budget -= chunk
        return new

    def _plan(self, began: int) -> PrefillStep | DecodeSteps | None:
        """Plan a step of the running sequences; preempt while there are no blocks for it."""
        sequences = self._sequences
        plan: PrefillStep | DecodeSteps | None = None
        while plan is None and len(sequences):
            if sequences.prefilling:
                plan = sequences.plan_prefill(self.max_num_scheduled_tokens, began)
            else:
                plan = sequences.plan_decodes(room_s=0.0)
            for request in sequences.preempted:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
            sequences.preempted.clear()
        return plan

    def _preempt_request(self, request: Request, timestamp: float) -> None:  # noqa: ARG002 - as vLLM's
        """Queue a preempted request again."""
        self.num_preemptions += 1
        request.row = None
        request.num_preemptions += 1
        self.waiting.add_request(request)

    def _forget(self, ended: list[Request]) -> None:
        for request in ended:
            request.row = None
            del self.requests[request.request_id]
            self.finished_req_ids.add(request.request_id)
        self.running = [request for request in self.running if request.row is not None]


def _itself(request: Request) -> Request:
    """Return the request, which is its own rank."""
    return request
