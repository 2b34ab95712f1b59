"""The naive engine: known times of small cases, and the scheduler's order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper_steps.hardware import known_hardware
from naive_vllm import ClosedLoop, simulate

HARDWARE = known_hardware()["h100-8b"]


def test_one_client_takes_its_prefill_and_its_decode_steps() -> None:
    outcome = simulate(HARDWARE, ClosedLoop(1, 1000, 11, requests=3))
    prefill_s = HARDWARE.step_time_s(1000, 0, 1000, 1000 * 500, admitted=1)
    decode_s = [HARDWARE.step_time_s(0, 1, 1000 + number) for number in range(1, 11)]
    assert outcome.ttft_s == pytest.approx(prefill_s)
    assert outcome.tpot_s == pytest.approx(sum(decode_s) / 10)


def test_a_long_prompt_is_computed_in_chunks_with_the_same_pairs() -> None:
    outcome = simulate(HARDWARE, ClosedLoop(1, 3000, 2, requests=1, max_tokens=2000))
    chunks_s = HARDWARE.step_time_s(2000, 0, 2000, 2000 * 1000, admitted=1)
    chunks_s += HARDWARE.step_time_s(1000, 0, 3000, 1000 * 2500)
    assert outcome.ttft_s == pytest.approx(chunks_s)


def test_a_full_kv_cache_preempts_or_waits_and_every_request_ends() -> None:
    load = ClosedLoop(16, 1000, 200, requests=48)
    room = simulate(HARDWARE, load)
    full = simulate(replace(HARDWARE, kv_capacity_tokens=6000.0), load)
    assert not room.preemptions + room.waited_steps
    assert full.preemptions
    assert full.waited_steps
    assert full.ttft_s > room.ttft_s


def test_a_request_larger_than_the_kv_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit in the KV cache"):
        simulate(replace(HARDWARE, kv_capacity_tokens=1000.0), ClosedLoop(1, 1000, 11, requests=1))


def test_more_clients_share_steps() -> None:
    alone = simulate(HARDWARE, ClosedLoop(1, 500, 100, requests=4))
    many = simulate(HARDWARE, ClosedLoop(32, 500, 100, requests=128))
    assert alone.tpot_s < many.tpot_s < 32 * alone.tpot_s
