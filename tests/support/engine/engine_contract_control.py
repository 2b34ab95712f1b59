"""What the supervisor sees of every engine: tiers, limits, usage, metrics, and its end."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import psutil

from fleetkeeper_contract.exit_codes import EXIT_CODES, DeathClass
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.shm.ledger import Tokens
from tests.support.engine.engine_contract import (
    CHAT,
    COMPLETIONS,
    READ_BY_US,
    chat,
    completion,
    counted,
    entries,
    frames,
    next_entries,
    post,
    quiet,
    running,
    vllm_metrics,
    with_usage,
)
from tests.support.engine.supervised_engine import RunningEngine
from tests.support.guards import GUARD_S

CEILINGS = (64, 2048)
RUNNING = 'fleetkeeper_running{tier="standard"}'
WAITING = 'fleetkeeper_waiting{tier="standard"}'
IDLE = "fleetkeeper_idle_seconds"


class ControlContract:
    """Tiers, live limits, metrics and the ledger."""

    def test_a_tier_is_counted_and_an_unknown_one_is_refused(self, engine: RunningEngine) -> None:
        name = 'fleetkeeper_requests_total{outcome="admitted",tier="batch"}'
        before = engine.metrics()[name]
        tier = {"X-Inference-Tier": "batch"}
        assert post(engine, COMPLETIONS, completion(2), headers=tier).status_code == 200
        assert engine.metrics()[name] == before + 1
        wrong = {"X-Inference-Tier": "fastest"}
        assert post(engine, COMPLETIONS, completion(2), headers=wrong).status_code == 400

    def test_limits_hold_while_the_engine_runs(self, engine: RunningEngine) -> None:
        assert engine.put_limits(2, 512).status_code == 200
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(post, engine, COMPLETIONS, completion(400)) for _ in range(6)]

            def holds() -> bool:
                found = engine.metrics()  # some may have ended before the first look
                return found[RUNNING] == 2 and found[WAITING] > 0

            engine.wait_for(holds, "two running while others wait", GUARD_S)
            assert engine.metrics()['fleetkeeper_limit_sequences{kind="effective"}'] == 2
            assert engine.put_limits(*CEILINGS).status_code == 200
            engine.wait_for(lambda: engine.metrics()[WAITING] == 0, "everybody admitted", GUARD_S)
            assert {answer.result().status_code for answer in answers} == {200}

    def test_the_metrics_that_are_read_exist(self, engine: RunningEngine) -> None:
        post(engine, COMPLETIONS, completion(3))
        found = vllm_metrics(engine)
        assert [name for name in READ_BY_US if name not in found] == []

    def test_running_sequences_are_seen(self, engine: RunningEngine) -> None:
        with running(engine, 3):
            engine.wait_for(
                lambda: vllm_metrics(engine)["vllm:num_requests_running"] == 3,
                "three running sequences",
                GUARD_S,
            )
            assert vllm_metrics(engine)["vllm:kv_cache_usage_perc"] > 0

    def test_the_idle_time_begins_at_the_end_of_a_request(self, engine: RunningEngine) -> None:
        with running(engine, 1):
            engine.wait_for(lambda: engine.metrics()[RUNNING] == 1, "a running stream", GUARD_S)
            assert engine.metrics()[IDLE] == 0
        engine.wait_for(lambda: engine.metrics()[IDLE] > 0, "an idle engine", GUARD_S)
        before = engine.metrics()[IDLE]
        post(engine, "/tokenize", {"model": "tiny", "prompt": "one two three"})
        assert engine.metrics()[IDLE] > before, "only requests for the engine count"

    def test_steps_are_counted_and_timed(self, engine: RunningEngine) -> None:
        before = engine.metrics()
        post(engine, COMPLETIONS, completion(40))
        quiet(engine)
        after = engine.metrics()
        for name in ("fleetkeeper_steps_total", "fleetkeeper_batch_time_seconds_count"):
            assert after[name] - before[name] >= 40
        for name in ("fleetkeeper_kv_capacity_tokens", "fleetkeeper_live_limits_supported"):
            assert after[name] > 0
        # The step that made the last token may be counted 200 ms later.
        tokens = "fleetkeeper_generation_tokens_total"
        assert after[tokens] - before[tokens] >= 40

    def test_usage_ledger_and_counters_agree(self, engine: RunningEngine) -> None:
        quiet(engine)
        before, known = counted(engine), len(entries(engine))
        usages = [
            post(engine, COMPLETIONS, completion(7)).json()["usage"],
            post(engine, CHAT, chat(5, n=2)).json()["usage"],
            post(engine, COMPLETIONS, completion(3, prompt=["one", "two three"])).json()["usage"],
            frames(post(engine, COMPLETIONS, with_usage(completion(11))))[-1]["usage"],
            frames(post(engine, CHAT, with_usage(chat(6, n=2))))[-1]["usage"],
        ]
        found = next_entries(engine, known, len(usages))
        assert [entry.tokens.answer for entry in found] == [
            usage["completion_tokens"] for usage in usages
        ]
        # Each of n sequences computes the prompt, as vLLM counts it; usage says it once.
        times = [1, 2, 1, 1, 2]
        assert [entry.tokens.prompt for entry in found] == [
            usage["prompt_tokens"] * count for usage, count in zip(usages, times, strict=True)
        ]
        after = counted(engine)
        assert Tokens(
            sum(entry.tokens.prompt for entry in found),
            sum(entry.tokens.cached for entry in found),
            sum(entry.tokens.answer for entry in found),
        ) == Tokens(
            after.prompt - before.prompt,
            after.cached - before.cached,
            after.answer - before.answer,
        )
        assert {entry.tier for entry in found} == {Tier.STANDARD}
        assert not any(entry.aborted for entry in found)


class EndsContract:
    """How an engine ends. `own_engine` is the test's own."""

    async def test_a_drain_lets_every_stream_end(self, own_engine: RunningEngine) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(GUARD_S)) as session:
            streams = [asyncio.create_task(own_engine.stream(session, 400)) for _ in range(8)]
            await asyncio.to_thread(
                own_engine.wait_for,
                lambda: own_engine.metrics()[RUNNING] == 8,
                "eight running streams",
                GUARD_S,
            )
            own_engine.process.send_signal(signal.SIGTERM)
            found = await asyncio.gather(*streams)
        assert [stream.tokens for stream in found] == [400] * 8
        assert {(stream.rest, stream.broken) for stream in found} == {(b"", "")}
        assert await asyncio.to_thread(own_engine.wait_end) == 0

    def test_an_engine_that_is_killed_ends_its_pod(self, own_engine: RunningEngine) -> None:
        (child,) = psutil.Process(own_engine.process.pid).children()
        child.kill()
        assert own_engine.wait_end() == EXIT_CODES[DeathClass.UNKNOWN]
        line = own_engine.termination()
        assert (line["class"], line["phase"]) == ("Unknown", "serve")
        assert "SIGKILL" in line["message"]
