"""What the scheduler counts: queue wait, batch time, steps and waiting sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fleetkeeper_contract.histogram_buckets import QUEUE_WAIT_EDGES_S
from fleetkeeper_contract.step_terms import TERMS
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.live_scheduling import LiveScheduling
from fleetkeeper_engine.in_vllm.scheduler import mixed_into
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.layout import SupervisorBlock
from fleetkeeper_engine.shm.region import Region
from tests.support.engine.scheduler_stand_in import (
    RULE,
    Clock,
    Request,
    StandIn,
    Step,
    block,
    calls,
    flight,
    made,
    outputs_of,
)


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
    output = outputs_of(1)
    scheduler.next = first
    scheduler.schedule()
    assert flight(region) == (1, 7)
    clock.now = 1000.2
    assert scheduler.update_from_output(first, output) is output
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
    output = outputs_of(1)
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
    output = outputs_of(1)

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
        scheduler.update_from_output(scheduler.next, outputs_of(1))
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
        def update_from_output(self, _: Step, outputs: Any) -> Any:
            self.requests.clear()
            self.running.clear()
            return outputs

    scheduler: Any = mixed_into(Pooling)()
    scheduler._live = LiveScheduling(scheduler, region, VllmSettings.of_environment(), Clock())
    for name in "ab":
        request = Request(name, RULE.number(Tier.BATCH, 999_000_000 + ord(name)))
        scheduler.requests[name] = request
        scheduler.running = [request]
        scheduler.next = Step({name: 3}, [SimpleNamespace(req_id=name)])
        step = scheduler.schedule()
        scheduler.update_from_output(step, outputs_of(0))
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


def test_preemptions_are_counted_and_the_call_is_passed_on(region: Region) -> None:
    """Shown with the next step."""
    scheduler, _ = made(region)
    assert scheduler._preempt_request(Request("x"), 1.0) == "x"
    scheduler.schedule()
    assert block(region).preemptions == 1
