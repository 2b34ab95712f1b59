"""Limits in force, and our code mixed into a scheduler: it limits, observes, and never ends the engine."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.histogram_buckets import QUEUE_WAIT_EDGES_S
from fleetkeeper_contract.step_terms import TERMS
from fleetkeeper_engine.in_vllm import plugin
from fleetkeeper_engine.in_vllm.live_scheduling import NEEDED, LiveScheduling
from fleetkeeper_engine.in_vllm.priority import PriorityRule
from fleetkeeper_engine.in_vllm.realtime_reserve import (
    RESERVE_KEPT_S,
    active_sequences,
    progressing_tokens,
    reserve_of,
)
from fleetkeeper_engine.in_vllm.scheduler import chosen_class, live_scheduler, mixed_into
from fleetkeeper_engine.in_vllm.settings import ENVIRONMENT, VllmSettings
from fleetkeeper_engine.in_vllm.stats import (
    Flight,
    SchedulerRecord,
    prefill_tokens_of,
)
from fleetkeeper_engine.limits import (
    NOTCHES,
    RETURN_S,
    LimitRange,
    lease_holds,
    limits_change_at,
    limits_in_force,
)
from fleetkeeper_engine.shm.layout import SCHEDULER, CapBlock, SupervisorBlock, Tier
from fleetkeeper_engine.shm.region import ENVIRONMENT as REGION_ENVIRONMENT
from fleetkeeper_engine.shm.region import Region

RULE = PriorityRule(0, 30_000_000)
SEQUENCES, TOKENS = LimitRange(4, 64), LimitRange(256, 2048)


# --- limits in force


@given(
    st.integers(0, 2**31),
    st.integers(0, 2**31),
    st.floats(0, 1000),
    st.floats(0, 2000),
)
def test_limits_stay_between_floor_and_ceiling(
    wanted_sequences: int, wanted_tokens: int, deadline: float, now: float
) -> None:
    """Whatever is requested and whenever: buffers are sized by the ceiling, never beyond."""
    lease = SupervisorBlock(
        sequences=wanted_sequences, tokens=wanted_tokens, lease_deadline=deadline
    )
    limits = limits_in_force(lease, SEQUENCES, TOKENS, now)
    assert SEQUENCES.floor <= limits.sequences <= SEQUENCES.ceiling
    assert TOKENS.floor <= limits.tokens <= TOKENS.ceiling


def test_without_a_lease_start_up_values_hold() -> None:
    """A missing or torn region, or a supervisor without a limits lease."""
    for lease in (None, SupervisorBlock(), SupervisorBlock(sequences=8, tokens=512)):
        limits = limits_in_force(lease, SEQUENCES, TOKENS, 5.0)
        assert (limits.sequences, limits.tokens) == (64, 2048)
        assert not lease_holds(lease, 5.0)


@given(st.integers(4, 64), st.lists(st.floats(0, 40), min_size=2))
def test_after_the_lease_limits_only_rise_by_notches_to_the_ceiling(
    wanted: int, times: list[float]
) -> None:
    """Ten steps of equal ratio over 30 s; a dead operator causes no cliff."""
    lease = SupervisorBlock(sequences=wanted, lease_deadline=100.0)
    seen = [
        limits_in_force(lease, SEQUENCES, TOKENS, 100.0 + since).sequences
        for since in sorted(times)
    ]
    assert seen == sorted(seen)
    end = limits_in_force(lease, SEQUENCES, TOKENS, 100.0 + RETURN_S)
    assert end.sequences == SEQUENCES.ceiling
    every = [
        limits_in_force(lease, SEQUENCES, TOKENS, 100.01 + RETURN_S * n / NOTCHES).sequences
        for n in range(NOTCHES + 1)
    ]
    ratio = (64 / wanted) ** (1 / NOTCHES)
    for low, high in pairwise(every):
        assert high <= low * ratio + 1


@given(st.floats(-50.0, 50.0), st.floats(0.0, 1.0), st.booleans())
def test_limits_stand_until_they_are_said_to_change(
    since_end: float, part: float, leased: bool
) -> None:
    """What a step may take over from the step before it without working it out."""
    lease = SupervisorBlock(sequences=7, tokens=300, lease_deadline=100.0 if leased else 0.0)
    now = 100.0 + since_end
    until = min(limits_change_at(lease, now), now + 1e4)
    later = now + part * (until - now)
    assert until >= now
    if later < until:
        found = [limits_in_force(lease, SEQUENCES, TOKENS, time) for time in (now, later)]
        assert found[0] == found[1]
    assert leased or until > now


@given(st.integers(1, 8192), st.integers(0, 512), st.integers(0, 8))
def test_a_step_has_a_token_for_every_running_sequence_and_room_for_a_prefill(
    wanted: int, running: int, drafts: int
) -> None:
    """Unless the start-up value itself is smaller: then it is that."""
    tokens = progressing_tokens(wanted, 8192, running, drafts)
    assert tokens <= 8192
    assert tokens >= min(8192, running * (1 + drafts) + 256)
    assert tokens >= min(8192, wanted)


@given(st.integers(1, 512), st.integers(0, 512), st.integers(0, 64))
def test_the_reserve_is_filled_by_realtime_only(limit: int, running: int, first: int) -> None:
    """Others fill up to the limit less the reserve; realtime, one for one, up to the limit."""
    active = active_sequences(limit, running, first, reserved=True)
    assert active <= limit
    assert active >= limit - reserve_of(limit) >= 1
    admitted_beyond = max(0, active - max(running, limit - reserve_of(limit)))
    assert admitted_beyond <= first
    assert active_sequences(limit, running, first, reserved=False) == limit


# --- a scheduler to mix into


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

    def update_from_output(self, *_: Any) -> str:
        return "outputs"

    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def _preempt_request(self, request: Request, _: float) -> str:
        return request.request_id


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Region:
    path = tmp_path / "region"
    monkeypatch.setenv(REGION_ENVIRONMENT, str(path))
    settings = VllmSettings(min_sequences=4, min_tokens=256, max_sequences=64, max_tokens=2048)
    monkeypatch.setenv(ENVIRONMENT, settings.to_json())
    return Region.create(path)


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


def test_limits_are_in_force_at_the_next_schedule_and_nothing_else_is_touched(
    region: Region,
) -> None:
    """Sequences and tokens follow; the attribute whose lowering ends vLLM's core stays."""
    scheduler, clock = made(region)
    scheduler.schedule()
    region.write_supervisor(
        SupervisorBlock(generation=9, sequences=8, tokens=512, lease_deadline=clock.now + 1)
    )
    scheduler.schedule()
    scheduler.running = [Request(str(n)) for n in range(40)]
    region.write_supervisor(
        SupervisorBlock(generation=10, sequences=1, tokens=1, lease_deadline=clock.now + 1)
    )
    scheduler.schedule()
    assert scheduler.seen == [(64, 2048, 64), (8, 512, 64), (4, 40 + 256, 64)]
    assert (
        block(region).generation,
        block(region).limit_sequences,
        block(region).limit_tokens,
    ) == (
        10,
        4,
        296,
    )
    clock.now += 100
    scheduler.schedule()
    assert scheduler.seen[-1] == (64, 2048, 64)


def test_without_chunked_prefill_tokens_stay_at_start_up(region: Region) -> None:
    """A prompt longer than the step's tokens would block vLLM's queue."""
    scheduler, clock = made(region)
    scheduler.scheduler_config.enable_chunked_prefill = False
    scheduler._live = LiveScheduling(scheduler, region, VllmSettings(), clock)
    region.write_supervisor(SupervisorBlock(tokens=256, sequences=8, lease_deadline=2000.0))
    scheduler.schedule()
    assert scheduler.seen == [(8, 2048, 64)]
    assert block(region).floor_tokens == 2048


def test_whole_blocks_and_undivided_media_widen_the_prefill_quantum(region: Region) -> None:
    """A hybrid model's prefill goes in whole blocks: with less to spare it would never progress."""
    scheduler, clock = made(region)
    scheduler.need_mamba_block_aligned_split = True
    scheduler.cache_config.block_size = 1024
    scheduler._live = LiveScheduling(
        scheduler, region, VllmSettings(min_tokens=64, max_tokens=2048), clock
    )
    region.write_supervisor(SupervisorBlock(tokens=64, lease_deadline=2000.0))
    scheduler.running = [Request("a")]
    scheduler.schedule()
    assert scheduler.seen[-1][1] == 1 + 1024


def test_above_the_memory_cap_no_new_sequence_is_let_in(region: Region) -> None:
    """Nothing new, while what runs keeps its tokens."""
    scheduler, _ = made(region)
    region.write_supervisor(SupervisorBlock(cap_exceeded=True))
    scheduler.schedule()
    assert scheduler.seen == [(0, 2048, 64)]


def test_the_reserve_is_kept_while_realtime_comes(region: Region) -> None:
    """After a realtime request 60 of 64 slots are for all; 10 s later all 64 are again."""
    scheduler, clock = made(region)
    request = Request("r", RULE.number(Tier.REALTIME, 999_000_000))
    scheduler.requests["r"] = request
    scheduler.next = Step({"r": 1}, [SimpleNamespace(req_id="r")])
    scheduler.schedule()
    scheduler.next = Step()
    scheduler.schedule()
    scheduler.running = [Request(str(n)) for n in range(60)]
    scheduler.waiting = [request, Request("s", RULE.number(Tier.STANDARD, 1))]
    scheduler.schedule()
    clock.now += RESERVE_KEPT_S
    scheduler.schedule()
    assert [seen[0] for seen in scheduler.seen] == [64, 60, 61, 64]


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("time"), st.sampled_from([0.01, 0.5, 3.0, 40.0])),
            st.tuples(
                st.just("lease"),
                st.builds(
                    SupervisorBlock,
                    generation=st.integers(1, 9),
                    sequences=st.integers(0, 80),
                    tokens=st.integers(0, 4096),
                    lease_deadline=st.sampled_from([0.0, 999.0, 1002.0, 1060.0]),
                    cap_exceeded=st.booleans(),
                ),
            ),
            st.tuples(st.just("running"), st.integers(0, 64)),
            st.tuples(st.just("realtime"), st.integers(1, 3)),
        ),
        max_size=30,
    )
)
def test_limits_that_stay_are_those_worked_out_anew(
    events: list[tuple[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever changes: a step that finds nothing changed has the limits of one that looks at everything."""
    region = Region.create(tmp_path_factory.mktemp("regions") / "region")
    clock, settings = Clock(), VllmSettings(min_sequences=4, min_tokens=256)
    short, long = (mixed_into(StandIn)() for _ in range(2))
    lives = [LiveScheduling(scheduler, region, settings, clock) for scheduler in (short, long)]
    for what, value in events:
        if what == "time":
            clock.now += value
        elif what == "lease":
            region.write_supervisor(value)
        for scheduler, live in zip((short, long), lives, strict=True):
            if what == "running":
                scheduler.running = [Request(str(n)) for n in range(value)]
            live.before_schedule()
            live.after_schedule(realtime_step(scheduler, value if what == "realtime" else 0, clock))
        lives[1]._same_until = -math.inf
        for live in lives:
            live.before_schedule()
        assert [getattr(short, name) for name in NEEDED] == [getattr(long, name) for name in NEEDED]
        for name in ("generation", "limit_sequences", "limit_tokens"):
            assert len({live.record.cells.whole[SCHEDULER.cells[name]] for live in lives}) == 1


def realtime_step(scheduler: StandIn, count: int, clock: Clock) -> Step:
    """One with so many new realtime sequences in it."""
    number = RULE.number(Tier.REALTIME, round(clock.now * 1e6))
    names = [f"{clock.now}-{n}" for n in range(count)]
    scheduler.requests.update({name: Request(name, number) for name in names})
    return Step(dict.fromkeys(names, 1), [SimpleNamespace(req_id=name) for name in names])


def test_queue_wait_is_counted_once_a_request_at_its_first_schedule(region: Region) -> None:
    """From arrival in the middleware; a second sequence, a resumed one or the supervisor's own: not again."""
    scheduler, clock = made(region)
    number = RULE.number(Tier.BATCH, 998_000_000)
    for name, priority, preempted in (
        ("a", number, 0),
        ("b", number, 0),
        ("c", 0, 0),
        ("d", RULE.number(Tier.BATCH, 5), 1),
    ):
        scheduler.requests[name] = Request(name, priority, preempted)
    scheduler.next = Step(
        dict.fromkeys("abcd", 3), [SimpleNamespace(req_id=name) for name in "abcd"]
    )
    scheduler.schedule()
    scheduler.schedule()
    assert clock.now == 1000.0
    buckets = block(region).queue_wait_of(Tier.BATCH)
    assert sum(buckets) == 1
    assert QUEUE_WAIT_EDGES_S[buckets.index(1)] == 2.0
    assert block(region).queue_wait_sum == (0.0, 0.0, pytest.approx(2.0))


def test_batch_time_is_the_time_between_updates_while_there_is_work(region: Region) -> None:
    """Idle time is not in it; a step under way is told before it runs."""
    scheduler, clock = made(region)
    scheduler.running = [Request("a")]
    first, second = Step({"a": 7}), Step({"a": 1})
    output = SimpleNamespace(sampled_token_ids=[[5]])
    scheduler.next = first
    scheduler.schedule()
    assert flight(region) == (1, 7)
    clock.now = 1000.2
    assert scheduler.update_from_output(first, output) == "outputs"
    clock.now = 1000.25
    scheduler.next = second
    scheduler.schedule()
    scheduler.running = []
    clock.now = 1000.5
    scheduler.update_from_output(second, output)
    clock.now = 2000.0
    scheduler.running = [Request("a")]
    third = Step({"a": 1})
    scheduler.next = third
    scheduler.schedule()
    clock.now = 2000.3
    scheduler.update_from_output(third, output)
    found = block(region)
    assert (found.worked_steps, found.generation_tokens, flight(region)) == (3, 3, (0, 0))
    assert found.batch_time_sum == pytest.approx(0.2 + 0.3 + 0.3)
    assert found.prompt_tokens == 7
    assert found.kv_resident_tokens == 2500


class Grammatical(StandIn):
    """A scheduler that vLLM asks for the grammar of each step once it is with the workers."""

    def get_grammar_bitmask(self, step: Step) -> str:
        return f"grammar of {len(step.num_scheduled_tokens)}"


def test_what_can_wait_is_counted_while_the_workers_compute(region: Region) -> None:
    """Word of a step goes out before it runs; the step before it is counted once it runs."""
    scheduler: Any = mixed_into(Grammatical)()
    clock = Clock()
    scheduler._live = LiveScheduling(scheduler, region, VllmSettings.of_environment(), clock)
    request = Request("a", RULE.number(Tier.STANDARD, 999_500_000))
    scheduler.requests["a"] = request
    scheduler.running = [request]
    output = SimpleNamespace(sampled_token_ids=[[5]])
    first, second = Step({"a": 7}, [SimpleNamespace(req_id="a")]), Step({"a": 1})
    scheduler.next = first
    scheduler.schedule()
    assert (flight(region), sum(block(region).queue_wait_of(Tier.STANDARD))) == ((1, 7), 0)
    assert scheduler.get_grammar_bitmask(first) == "grammar of 1"
    assert sum(block(region).queue_wait_of(Tier.STANDARD)) == 1
    assert block(region).kv_resident_tokens == 2500
    clock.now = 1000.2
    scheduler.update_from_output(first, output)
    scheduler.next = second
    scheduler.schedule()
    assert (block(region).worked_steps, flight(region)) == (0, (1, 1))
    scheduler.get_grammar_bitmask(second)
    assert (block(region).worked_steps, block(region).prompt_tokens) == (1, 7)
    assert block(region).batch_time_sum == pytest.approx(0.2)
    scheduler.running = []
    clock.now = 1000.5
    scheduler.update_from_output(second, output)
    found = block(region)
    assert (found.worked_steps, found.generation_tokens, flight(region)) == (2, 2, (0, 0))


def test_short_steps_are_counted_together_and_lose_nothing(region: Region) -> None:
    """Every 200 ms; at once with a new lease, and when the work is done. Of a new sequence nothing is lost."""
    scheduler: Any = mixed_into(Grammatical)()
    clock = Clock()
    scheduler._live = LiveScheduling(scheduler, region, VllmSettings.of_environment(), clock)
    for name in "ab":
        scheduler.requests[name] = Request(name, RULE.number(Tier.STANDARD, 999_900_000))
    scheduler.running = [scheduler.requests["a"]]
    output = SimpleNamespace(sampled_token_ids=[[5]])

    def step(new: tuple[str, ...] = ()) -> int:
        scheduler.next = Step({"a": 1, **dict.fromkeys(new, 7)}, [named(name) for name in new])
        sent = scheduler.schedule()
        scheduler.get_grammar_bitmask(sent)
        said = block(region).worked_steps
        clock.now += 0.041
        scheduler.update_from_output(sent, output)
        return int(said)

    assert [step() for _ in range(7)] == [0, 0, 0, 0, 0, 5, 5]
    assert step(("b",)) == 5
    del scheduler.requests["b"]
    assert step() == 5
    region.write_supervisor(SupervisorBlock(generation=4, sequences=8, lease_deadline=2000.0))
    assert step() == 9, "a new lease: whoever sent it waits for its acknowledgement"
    assert (block(region).generation, block(region).limit_sequences) == (4, 8)
    assert step() == 9
    scheduler.next = Step({"a": 1})
    last = scheduler.schedule()
    scheduler.get_grammar_bitmask(last)
    clock.now += 0.041
    scheduler.running, scheduler.kv_cache_manager.usage = [], 0.0
    scheduler.update_from_output(last, output)
    found = block(region)
    assert (found.worked_steps, found.generation_tokens, flight(region)) == (12, 12, (0, 0))
    kv = TERMS.index("kv")
    assert found.step_model[kv] + found.step_model[kv + len(TERMS)] == 12 * 2500, "as it was then"
    assert found.kv_resident_tokens == 0
    assert found.batch_time_sum == pytest.approx(0.492)
    assert (found.prompt_tokens, sum(found.batch_sequences_buckets)) == (7, 12)
    waits = found.queue_wait_of(Tier.STANDARD)
    assert sum(waits) == 1, "looked at while vLLM knew it"
    assert found.queue_wait_sum[Tier.STANDARD] == pytest.approx(0.387), "until its step, not later"


def test_what_waited_is_not_said_to_wait_for_long(region: Region) -> None:
    """The middleware's own rule goes by it: a fifth of a second too long would close the batch tier."""
    scheduler: Any = mixed_into(Grammatical)()
    clock = Clock()
    scheduler._live = LiveScheduling(scheduler, region, VllmSettings.of_environment(), clock)
    running, waiting = (Request(n, RULE.number(Tier.STANDARD, 999_900_000)) for n in "ab")
    scheduler.running, scheduler.waiting = [running], [waiting]
    said = []
    for number in range(8):
        scheduler.next = Step({"a": 1})
        scheduler.get_grammar_bitmask(scheduler.schedule())
        said.append(region.read_heartbeat().oldest_arrival[Tier.STANDARD])
        clock.now += 0.02
        scheduler.update_from_output(scheduler.next, SimpleNamespace(sampled_token_ids=[[5]]))
        if number == 1:
            scheduler.waiting = []
    assert said == [pytest.approx(999.9)] * 3 + [0.0] * 5


def named(request: str) -> SimpleNamespace:
    """A sequence that is in a step for the first time."""
    return SimpleNamespace(req_id=request)


def test_a_step_without_a_question_for_its_grammar_is_counted_before_it_is_gone(
    region: Region,
) -> None:
    """A pooling model's request is finished, and forgotten by vLLM, with the output of its one step."""

    class Pooling(Grammatical):
        def update_from_output(self, *_: Any) -> str:
            self.requests.clear()
            self.running.clear()
            return "outputs"

    scheduler: Any = mixed_into(Pooling)()
    scheduler._live = LiveScheduling(scheduler, region, VllmSettings.of_environment(), Clock())
    for name in "ab":
        request = Request(name, RULE.number(Tier.BATCH, 999_000_000 + ord(name)))
        scheduler.requests[name] = request
        scheduler.running = [request]
        scheduler.next = Step({name: 3}, [SimpleNamespace(req_id=name)])
        step = scheduler.schedule()
        scheduler.update_from_output(step, SimpleNamespace())
    assert sum(block(region).queue_wait_of(Tier.BATCH)) == 2
    assert (block(region).worked_steps, block(region).prompt_tokens) == (2, 6)


def test_two_schedule_calls_in_a_row_lose_nothing(region: Region) -> None:
    """With asynchronous scheduling and structured output the grammar is asked for later."""
    scheduler: Any = mixed_into(Grammatical)()
    clock = Clock()
    scheduler._live = LiveScheduling(scheduler, region, VllmSettings.of_environment(), clock)
    for name in "ab":
        clock.now += 1.0
        request = Request(name, RULE.number(Tier.REALTIME, 999_000_000 + ord(name)))
        scheduler.requests[name] = request
        scheduler.running.append(request)
        scheduler.next = Step({name: 3}, [SimpleNamespace(req_id=name)])
        scheduler.schedule()
    scheduler.get_grammar_bitmask(scheduler.next)
    assert sum(block(region).queue_wait_of(Tier.REALTIME)) == 2
    assert (calls(region), flight(region)) == (2, (2, 6))


def test_with_two_steps_under_way_time_is_not_counted_twice() -> None:
    """Asynchronous scheduling sends step n+1 before the output of n is there."""
    record = SchedulerRecord()
    steps = [object() for _ in range(4)]
    flights = [Flight(step, 1, 0.1 * n) for n, step in enumerate(steps)]
    record.record_schedule(flights[0])
    record.record_schedule(flights[1])
    record.record_output(steps[0], [[5]], 0.3, work_left=True)
    record.record_schedule(flights[2])
    record.record_output(steps[2], [[5]], 0.9, work_left=False)
    record.record_output(object(), [[5]], 1.0, work_left=False)
    record.count()
    assert record._real[record._at["batch_time_sum"]] == pytest.approx(0.9)
    assert record._whole[record._at["worked_steps"]] == 2
    assert record.heartbeat.whole.tolist() == [3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("scheduled", "new", "expected"),
    [([1, 1, 1], [], 0), ([1, 300, 1], [], 300), ([1, 300, 2], [300, 2], 302), ([2], [2], 2)],
)
def test_prefill_tokens_are_told_from_decodes(
    scheduled: list[int], new: list[int], expected: int
) -> None:
    """New sequences prefill, and so does any chunk larger than a decode."""
    assert prefill_tokens_of(scheduled, new, 1, only_decodes=False) == expected
    assert prefill_tokens_of(scheduled, new, 1, only_decodes=True) == 0


@given(
    st.lists(st.integers(1, 5) | st.integers(1, 2048), max_size=80),
    st.integers(0, 80),
    st.integers(1, 4),
)
def test_prefill_tokens_are_all_but_the_decodes(
    scheduled: list[int], new: int, decode_tokens: int
) -> None:
    """Counted sequence by sequence: the first so many are new, what others take beyond a decode is prefill."""
    expected = sum(
        tokens for at, tokens in enumerate(scheduled) if at < new or tokens > decode_tokens
    )
    found = prefill_tokens_of(scheduled, scheduled[:new], decode_tokens, only_decodes=False)
    assert found == expected


def test_preemptions_are_counted_and_the_call_is_passed_on(region: Region) -> None:
    """Shown with the next step."""
    scheduler, _ = made(region)
    assert scheduler._preempt_request(Request("x"), 1.0) == "x"
    scheduler.schedule()
    assert block(region).preemptions == 1


def test_a_scheduler_without_the_attributes_runs_as_it_is_and_says_so(region: Region) -> None:
    """Another vLLM: live limits are not supported, nothing is set, counting goes on."""

    class Other(StandIn):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.max_num_scheduled_tokens = None  # type: ignore[assignment]

    scheduler: Any = mixed_into(Other)()
    region.write_supervisor(SupervisorBlock(sequences=8, lease_deadline=1e12))
    scheduler.schedule()
    assert scheduler.seen == [(64, None, 64)]
    assert not block(region).supported
    assert calls(region) == 1


def test_a_fault_of_ours_never_ends_the_engine(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    """Scheduling goes on at start-up limits, and shared memory says that live limits are off."""
    scheduler, clock = made(region)
    region.write_supervisor(SupervisorBlock(sequences=8, lease_deadline=clock.now + 1))
    scheduler.running = [Request("a")]
    scheduler.next = Step({"a": 7})
    scheduler.schedule()
    assert block(region).supported
    assert (sum(block(region).running), flight(region)) == (1, (1, 7))
    del scheduler.kv_cache_manager
    clock.now += 0.1
    step = scheduler.schedule()
    assert scheduler.update_from_output(step, None) == "outputs"
    scheduler.schedule()
    assert [seen[0] for seen in scheduler.seen] == [8, 8, 64]
    assert not block(region).supported
    assert block(region).instrumentation_disabled
    assert (sum(block(region).running), flight(region)) == (0, (0, 0))
    assert "live batch limits are off" in caplog.text


def test_without_shared_memory_the_engine_runs_at_start_up_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Missing shared memory means start-up values, not a failure."""
    monkeypatch.delenv(REGION_ENVIRONMENT, raising=False)
    scheduler: Any = mixed_into(StandIn)()
    scheduler.schedule()
    assert scheduler.seen == [(64, 2048, 64)]


class _Config(SimpleNamespace):
    def get_scheduler_cls(self) -> type[Any]:
        return {None: StandIn, "ours": dict}.get(self.scheduler_cls, type(self.scheduler_cls))


def test_the_factory_takes_the_class_that_vllm_would_have_chosen(region: Region) -> None:
    """Sync, async or diffusion is vLLM's own choice; its configuration is left as it was."""
    config = SimpleNamespace(scheduler_config=_Config(scheduler_cls="ours", async_scheduling=False))
    assert chosen_class(config) is StandIn
    assert config.scheduler_config.scheduler_cls == "ours"
    scheduler = live_scheduler(vllm_config=config)
    assert isinstance(scheduler, StandIn)
    assert type(scheduler).__name__ == "LiveStandIn"
    assert block(region).supported


# --- the memory cap of CUDA workers


class FakeDevice:
    """torch for one device of 80 GiB, of which 2 GiB lie outside the allocator."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.fractions: list[float] = []

    def memory(self) -> tuple[int, int]:
        return 77 * 2**30, 80 * 2**30

    def reserved_bytes(self) -> int:
        return 2**30

    def allocated_bytes(self) -> int:
        return 2**29

    def set_fraction(self, fraction: float) -> None:
        self.fractions.append(fraction)


class Worker:
    """A vLLM worker with the names that ours touches."""

    def __init__(self, kind: str = "cuda") -> None:
        self.kind = kind
        self.rank = 0
        self.device: Any = None

    def init_device(self) -> str:
        self.device = SimpleNamespace(type=self.kind, index=0)
        return "initialised"


def test_the_cap_is_armed_after_the_device_is_set_and_reported_in_shared_memory(
    region: Region,
) -> None:
    """(0.8 x 80 - 2) / 80 = 0.775 of the device for the allocator; a second wrap changes nothing."""
    devices: list[FakeDevice] = []

    def make(index: int) -> FakeDevice:
        devices.append(FakeDevice(index))
        return devices[-1]

    class Wrapped(Worker):
        pass

    for _ in range(2):
        plugin.wrap(Wrapped, lambda worker: plugin.arm_worker(worker, make))
    assert not region.caps_armed()
    assert Wrapped().init_device() == "initialised"
    assert [device.fractions for device in devices] == [[pytest.approx(0.775)]]
    assert region.caps_armed()
    cap = region.read_cap(0)
    assert cap is not None
    assert (cap.total_bytes, cap.non_torch_bytes) == (80 * 2**30, 2 * 2**30)
    assert (cap.reserved_bytes, cap.allocated_bytes) == (2**30, 2**29)


def test_a_cap_that_cannot_be_armed_is_left_unarmed_and_logged(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker starts, the pod never turns ready."""

    class Full(FakeDevice):
        def memory(self) -> tuple[int, int]:
            return 2**30, 80 * 2**30

    class Wrapped(Worker):
        pass

    plugin.wrap(Wrapped, lambda worker: plugin.arm_worker(worker, Full))
    assert Wrapped().init_device() == "initialised"
    assert not region.caps_armed()
    assert region.read_cap(0) is None
    assert "more than the cap of 80%" in caplog.text


def test_on_cpu_there_is_no_allocator_to_hold(region: Region) -> None:
    """Plan and watch hold the cap there."""
    worker = Worker("cpu")
    worker.init_device()
    plugin.arm_worker(worker, FakeDevice)
    assert region.read_cap(0) is None


@given(st.floats(0.1, 0.95), st.integers(2**30, 2**38), st.floats(0.0, 1.0))
def test_allocator_and_the_rest_stay_within_the_cap(cap: float, total: int, other: float) -> None:
    """What torch may take plus what lies outside it is at most the cap, or it is refused."""
    non_torch = int(other * total)
    try:
        fraction = plugin.allocator_fraction(cap, total, non_torch)
    except plugin.CapTooLowError:
        assert non_torch / total >= cap
        return
    assert 0.0 < fraction <= 1.0
    assert fraction * total + non_torch <= cap * total * (1 + 1e-9)


def test_fragmentation_figures_are_refreshed(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reporter writes what the allocator says now, keeping what was armed."""
    rounds = iter([None])

    def sleep(_: float) -> None:
        next(rounds)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(StopIteration):
        plugin.report_forever(region, 0, FakeDevice(0), CapBlock(armed=True, fraction=0.7))
    cap = region.read_cap(0)
    assert cap is not None
    assert (cap.armed, cap.fraction, cap.reserved_bytes) == (True, 0.7, 2**30)


def test_settings_survive_the_environment_and_another_version_is_told_apart() -> None:
    """The supervisor writes them, vLLM's processes read them; unknown fields are two versions in one pod."""
    settings = VllmSettings(max_sequences=7, internal_token="t")
    assert VllmSettings.of_environment({ENVIRONMENT: settings.to_json()}) == settings
    assert VllmSettings.of_environment({}) == VllmSettings()
    with pytest.raises(ValueError, match="another version of fleetkeeper_engine"):
        VllmSettings.of_environment({ENVIRONMENT: '{"later_field": 1}'})
