"""Live limits, mixed into a scheduler: they apply at the next step and never end the engine."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.live_scheduling import NEEDED, LiveScheduling
from fleetkeeper_engine.in_vllm.realtime_reserve import (
    RESERVE_KEPT_S,
    active_sequences,
    progressing_tokens,
    reserve_of,
)
from fleetkeeper_engine.in_vllm.scheduler import chosen_class, live_scheduler, mixed_into
from fleetkeeper_engine.in_vllm.vllm_settings import ENVIRONMENT, VllmSettings
from fleetkeeper_engine.shm.layout import SCHEDULER, SupervisorBlock
from fleetkeeper_engine.shm.region import ENVIRONMENT as REGION_ENVIRONMENT
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
    realtime_step,
)


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


@pytest.mark.promise("live-limits")
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


class _WithGrammars(StandIn):
    def get_grammar_bitmask(self) -> None:
        """vLLM asks for it once the step is with the workers."""


def test_the_wait_of_a_request_that_is_aborted_under_way_counts(region: Region) -> None:
    """Its client hangs up after it was scheduled, and before its step is inspected."""
    scheduler: Any = mixed_into(_WithGrammars)()
    scheduler._live = LiveScheduling(scheduler, region, VllmSettings(), Clock())
    scheduler.requests["r"] = Request("r", RULE.number(Tier.STANDARD, 999_000_000))
    scheduler.next = Step({"r": 1}, [SimpleNamespace(req_id="r")])
    step = scheduler.schedule()
    del scheduler.requests["r"]
    scheduler.get_grammar_bitmask()
    scheduler.update_from_output(step, {})
    assert sum(block(region).queue_wait_buckets) == 1


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


@pytest.mark.promise("unknown-scheduler")
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
    step, outputs = scheduler.schedule(), outputs_of(1)
    assert scheduler.update_from_output(step, outputs) is outputs
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


def test_settings_survive_the_environment_and_another_version_is_told_apart() -> None:
    """The supervisor writes them, vLLM's processes read them; unknown fields are two versions in one pod."""
    settings = VllmSettings(max_sequences=7, internal_token="t")
    assert VllmSettings.of_environment({ENVIRONMENT: settings.to_json()}) == settings
    assert VllmSettings.of_environment({}) == VllmSettings()
    with pytest.raises(ValueError, match="another version of fleetkeeper_engine"):
        VllmSettings.of_environment({ENVIRONMENT: '{"later_field": 1}'})
