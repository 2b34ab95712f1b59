"""A stand-in for the scheduler of vLLM, with live limits mixed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.live_scheduling import LiveScheduling
from fleetkeeper_engine.in_vllm.priority import PriorityRule
from fleetkeeper_engine.in_vllm.scheduler import mixed_into
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.region import Region

RULE = PriorityRule(0, 30_000_000)


@dataclass
class Request:
    request_id: str
    priority: int = 0
    num_preemptions: int = 0


@dataclass
class Step:
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_new_reqs: list[Any] = field(default_factory=list)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def outputs_of(*tokens: int) -> dict[int, Any]:
    """What vLLM makes of a step that gave each sequence so many tokens."""
    return {0: SimpleNamespace(outputs=[SimpleNamespace(new_token_ids=[5] * n) for n in tokens])}


class StandIn:
    """The part of vLLM's scheduler that ours touches, with vLLM's names."""

    def __init__(self, **_: Any) -> None:
        self.max_num_running_reqs = 64
        self.max_num_active_reqs = 64
        self.max_num_scheduled_tokens = 2048
        self.num_spec_tokens = 0
        self.scheduler_config = SimpleNamespace(
            enable_chunked_prefill=True, disable_chunked_mm_input=False
        )
        self.cache_config = SimpleNamespace(kv_cache_size_tokens=10_000, num_gpu_blocks=1)
        self.kv_cache_manager = SimpleNamespace(usage=0.25)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.seen: list[tuple[int, int, int]] = []
        self.next = Step()

    def schedule(self) -> Step:
        self.seen.append(
            (self.max_num_active_reqs, self.max_num_scheduled_tokens, self.max_num_running_reqs)
        )
        return self.next

    def update_from_output(self, _: Step, outputs: Any) -> Any:
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def _preempt_request(self, request: Request, _: float) -> str:
        return request.request_id


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(region: Region) -> tuple[Any, Clock]:
    scheduler: Any = mixed_into(StandIn)()
    clock = Clock()
    scheduler._live = LiveScheduling(scheduler, region, VllmSettings.of_environment(), clock)
    return scheduler, clock


def block(region: Region) -> Any:
    found = region.read_scheduler()
    assert found is not None
    return found


def flight(region: Region) -> tuple[int, int]:
    """Steps under way, and the tokens in them."""
    found = region.read_heartbeat()
    return found.steps, found.tokens


def calls(region: Region) -> int:
    return region.read_heartbeat().schedule_calls


def realtime_step(scheduler: StandIn, count: int, clock: Clock) -> Step:
    """One with so many new realtime sequences in it."""
    number = RULE.number(Tier.REALTIME, round(clock.now * 1e6))
    names = [f"{clock.now}-{n}" for n in range(count)]
    scheduler.requests.update({name: Request(name, number) for name in names})
    return Step(dict.fromkeys(names, 1), [SimpleNamespace(req_id=name) for name in names])
