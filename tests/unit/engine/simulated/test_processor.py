"""The output processor of a simulated engine: frames, ends, usage and metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetkeeper_engine.in_vllm.usage.accounts import CURRENT, Accounts
from fleetkeeper_engine.in_vllm.usage.hooks import hook
from fleetkeeper_engine.shm.ledger import LedgerReader, LedgerWriter, Tokens
from fleetkeeper_engine.simulated.core import Lateness, Prefill, SequenceOutput
from fleetkeeper_engine.simulated.processor import (
    Answer,
    Collector,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDeadError,
    OutputProcessor,
    Sampling,
)
from fleetkeeper_engine.simulated.series import Gauges, Series
from fleetkeeper_engine.simulated.tokens import TEXTS, Text

PROMPT = [7, 8, 9]
FIRST = Prefill(3, 2)
IDLE = Gauges(running=1, waiting=2, kv_usage=0.5, preemptions=3, num_gpu_blocks=10, block_size=16)


def made(
    sampling: Sampling, processor: OutputProcessor, name: str = "a", index: int = 0
) -> Collector:
    collector = Collector()
    request = EngineCoreRequest(name, PROMPT, sampling, Text(0, PROMPT), arrival_s=10.0)
    processor.add_request(request, index, collector)
    return collector


def text_of(start: int, count: int) -> str:
    return "".join(TEXTS[index] for index in Text(0, PROMPT).take(start + count)[start:])


async def taken(collector: Collector) -> Answer:
    (answer,) = (await asyncio.wait_for(collector.take(), 60)).values()
    return answer


def processor() -> OutputProcessor:
    return OutputProcessor(Series("tiny", 2048))


async def test_a_stream_gets_its_first_token_at_once_and_then_every_interval() -> None:
    found = processor()
    collector = made(Sampling(9, streams=True, interval=3), found)
    sizes = []
    for step in range(9):
        last = "length" if step == 8 else None
        output = SequenceOutput("a", 1, last, FIRST if step == 0 else None)
        found.process_outputs([output], 11.0 + step)
        try:
            answer = await asyncio.wait_for(collector.take(), 0.01)
        except TimeoutError:
            continue
        sizes.append(len(answer[0].tokens))
    assert sizes == [1, 3, 3, 2]
    assert len(found) == 0


async def test_a_whole_answer_comes_once() -> None:
    found = processor()
    collector = made(Sampling(2), found)
    found.process_outputs([SequenceOutput("a", 1, None, FIRST)], 11.0)
    found.process_outputs([SequenceOutput("a", 1, "stop")], 12.0)
    answer = await taken(collector)
    assert answer.text == text_of(0, 2)
    assert (answer.finish_reason, answer.cached_tokens) == ("stop", 2)


async def test_a_stop_text_ends_the_sequence_in_the_engine_too() -> None:
    found = processor()
    stop = text_of(1, 2)
    collector = made(Sampling(9, stop=(stop,)), found)
    ended = [
        found.process_outputs([SequenceOutput("a", 1, None, FIRST if not step else None)], 11.0)
        for step in range(3)
    ]
    assert ended == [[], [], ["a"]]
    answer = await taken(collector)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text_of(0, 1), "stop", stop)
    assert len(answer.tokens) == 3, "tokens count, although their text is cut"


async def test_outputs_of_an_aborted_sequence_are_nobodys() -> None:
    found = processor()
    made(Sampling(9), found)
    assert found.abort_requests(["a", "unknown"]) == ["a"]
    assert found.process_outputs([SequenceOutput("a", 1, None, FIRST)], 11.0) == []


async def test_a_dead_engine_fails_every_request() -> None:
    found = processor()
    collector = made(Sampling(9), found)
    found.propagate_error(EngineDeadError())
    with pytest.raises(EngineDeadError):
        await collector.take()
    assert len(found) == 0


async def test_usage_is_counted_by_vllms_hooks(tmp_path: Path) -> None:
    """As the supervisor's middleware installs them on vLLM's class."""

    class Hooked(OutputProcessor):
        """A class of its own, because hooks stay."""

    assert "prefill_stats" in EngineCoreOutput.__annotations__
    ledger = tmp_path / "ledger"
    accounts = Accounts(LedgerWriter.open(ledger))
    hook(Hooked, accounts)
    found = Hooked(Series("tiny", 2048))
    account = accounts.open(None, None)
    CURRENT.set(account)
    made(Sampling(9), found, "a")
    made(Sampling(9), found, "b", 1)
    for name in "ab":
        found.process_outputs([SequenceOutput(name, 1, None, FIRST)], 11.0)
    found.process_outputs([SequenceOutput("a", 1, "length")], 12.0)
    found.abort_requests(["b"])
    accounts.end(account)
    reader = LedgerReader.open(ledger)
    assert reader is not None
    with reader:
        head = reader.head()
        assert head is not None
        ((_, entry, _),) = reader.entries(1, head.newest)
    assert entry.tokens == Tokens(6, 4, 3)
    assert entry.aborted
    CURRENT.set(None)


async def test_metrics_have_vllms_names_and_labels() -> None:
    series = Series("tiny", 2048)
    found = OutputProcessor(series)
    made(Sampling(2), found)
    made(Sampling(2), found, "b")
    found.process_outputs([SequenceOutput("a", 1, None, FIRST)], 10.5)
    found.process_outputs([SequenceOutput("a", 1, "length")], 11.0)
    found.abort_requests(["b"])
    lateness = Lateness()
    for late_s in (0.0004, 0.02, 7.0):
        lateness.record(late_s)
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(series.render(IDLE, lateness).decode())
        for sample in family.samples
    }
    model = (("engine", "0"), ("model_name", "tiny"))
    expected = {
        "prompt_tokens_total": 3,
        "prompt_tokens_cached_total": 2,
        "prefix_cache_hits_total": 2,
        "generation_tokens_total": 2,
        "num_requests_running": 1,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.5,
        "num_preemptions_total": 3,
        "time_to_first_token_seconds_sum": 0.5,
        "inter_token_latency_seconds_count": 1,
        "e2e_request_latency_seconds_sum": 1.0,
        "request_generation_tokens_sum": 2,
        "iteration_tokens_total_count": 2,
    }
    assert {name: samples[f"vllm:{name}", model] for name in expected} == expected
    for reason, count in {"length": 1, "abort": 0, "stop": 0}.items():
        labels = (("engine", "0"), ("finished_reason", reason), ("model_name", "tiny"))
        assert samples["vllm:request_success_total", labels] == count
    late = "fleetkeeper_simulated_step_lateness_seconds"
    counts = {"0.001": 1, "0.01": 1, "0.02": 2, "5.0": 2, "+Inf": 3}
    assert {edge: samples[f"{late}_bucket", (("le", edge),)] for edge in counts} == counts
    assert samples[f"{late}_sum", ()] == pytest.approx(7.0204)
