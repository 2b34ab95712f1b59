"""TTFT and ITL of a real vLLM's streams are what their client measures, on every route that streams."""

from __future__ import annotations

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from fleetkeeper_contract.headers import TIER_HEADER
from fleetkeeper_contract.histogram_buckets import TIME_TO_FIRST_TOKEN_EDGES_S
from tests.support.engine.supervised_engine import RunningEngine

TTFT, ITL = "fleetkeeper_time_to_first_token_seconds", "fleetkeeper_inter_token_latency_seconds"
WAIT = "fleetkeeper_queue_wait_seconds"
TOKENS = 40
ROUTES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two", "max_tokens": TOKENS},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "one two"}],
        "max_tokens": TOKENS,
    },
    "/v1/responses": {"input": "one two", "max_output_tokens": TOKENS},
}
USAGE = {"stream_options": {"include_usage": True}}
ROUNDS = 20
ROOM_S = 0.1
"""Between the middleware and a client that shares two cores with the engine."""


@dataclass
class Seen:
    """When a client saw the events of one stream, in seconds since it sent its request."""

    times: list[float] = field(default_factory=list)
    """Of events with tokens."""
    others: int = 0


def has_tokens(event: bytes) -> bool:
    """Read an event as a client would: JSON, not the middleware's marks."""
    data = re.search(rb"^data: (.*)$", event, re.MULTILINE)
    if data is None or data[1] == b"[DONE]":
        return False
    found = json.loads(data[1])
    if "choices" not in found:
        return str(found.get("type", "")).endswith(".delta")
    return bool(found["choices"]) and "role" not in found["choices"][0].get("delta", {})


async def streamed(
    engine: RunningEngine, session: aiohttp.ClientSession, path: str, tier: str, **more: Any
) -> Seen:
    """Read one stream to its end."""
    body = {"model": "tiny", "ignore_eos": True, "stream": True, **ROUTES[path], **more}
    if path != "/v1/responses":
        body |= USAGE
    seen, rest = Seen(), b""
    began = time.monotonic()
    async with session.post(
        f"{engine.url}{path}", json=body, headers={TIER_HEADER: tier}
    ) as response:
        assert response.status == 200, await response.text()
        async for chunk in response.content.iter_any():
            now = time.monotonic() - began
            *events, rest = (rest + chunk).split(b"\n\n")
            seen.times += [now for event in events if has_tokens(event)]
            seen.others += sum(not has_tokens(event) for event in events)
    return seen


async def all_streamed(
    engine: RunningEngine, calls: Sequence[tuple[str, str]], **more: Any
) -> list[Seen]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        return list(
            await asyncio.gather(
                *(streamed(engine, session, path, tier, **more) for path, tier in calls)
            )
        )


def gained(before: Mapping[str, float], after: Mapping[str, float], name: str, tier: str) -> float:
    key = f'{name}{{tier="{tier}"}}'
    return after[key] - before[key]


def within(metrics: Mapping[str, float], edge: float, tier: str) -> float:
    return metrics[f'{TTFT}_bucket{{le="{edge:.10g}",tier="{tier}"}}']


def compared(
    engine: RunningEngine, path: str, tiers: Sequence[str]
) -> Mapping[str, tuple[float, float]]:
    """Stream once in each of `tiers`; return how much later the client saw TTFTs and spans, by tier.

    What does not depend on how busy the machine is must hold each time.
    """
    before = engine.metrics()
    seen = asyncio.run(all_streamed(engine, [(path, tier) for tier in tiers]))
    # A client may have the last frame before the middleware has counted it.
    frames = sum(len(one.times) - 1 for one in seen)

    def are_counted() -> bool:
        now = engine.metrics()
        return sum(gained(before, now, f"{ITL}_count", tier) for tier in set(tiers)) >= frames

    engine.wait_for(are_counted, f"{frames} gaps in the histograms")
    after = engine.metrics()
    found = {}
    for tier in sorted(set(tiers)):
        mine = [one for one, of in zip(seen, tiers, strict=True) if of == tier]
        firsts = [one.times[0] for one in mine]
        gaps = sum(len(one.times) - 1 for one in mine)
        spans_s = sum(one.times[-1] - one.times[0] for one in mine)
        counted_s, gaps_s = (gained(before, after, f"{name}_sum", tier) for name in (TTFT, ITL))
        waited_s = gained(before, after, f"{WAIT}_sum", tier)
        print(
            f"{path} {tier}: TTFT {counted_s / len(mine):.4f} s, client {sum(firsts) / len(mine):.4f} s, "
            f"queue wait {waited_s / len(mine):.4f} s; ITL {1e3 * gaps_s / gaps:.2f} ms, "
            f"client {1e3 * spans_s / gaps:.2f} ms; {gaps} gaps, {mine[0].others} other events"
        )
        assert gaps >= len(mine), "a frame holds more tokens on a busy machine, never all"
        assert gained(before, after, f"{TTFT}_count", tier) == len(mine)
        assert gained(before, after, f"{ITL}_count", tier) == gaps
        assert waited_s < counted_s <= sum(firsts)
        # All are within the edge that holds the client's slowest.
        edge = TIME_TO_FIRST_TOKEN_EDGES_S[bisect_left(TIME_TO_FIRST_TOKEN_EDGES_S, max(firsts))]
        assert within(after, edge, tier) - within(before, edge, tier) == len(mine)
        late_s = (sum(firsts) - counted_s) / len(mine)
        found[tier] = late_s, abs(spans_s - gaps_s) / len(mine)
    return found


@pytest.mark.parametrize("path", list(ROUTES))
def test_the_histograms_hold_what_the_client_measured(engine: RunningEngine, path: str) -> None:
    """Every stream one TTFT, every frame with tokens after it one gap, in the tier of the request.

    A client sees a frame later than the middleware, and on a busy machine it is itself late: one of
    some rounds must agree.
    """
    differences = []
    for _ in range(ROUNDS):
        found = compared(engine, path, ["realtime", "standard", "standard", "batch"])
        assert set(found) == {"realtime", "standard", "batch"}
        differences.append(max(value for pair in found.values() for value in pair))
        if differences[-1] < ROOM_S:
            break
    assert min(differences) < ROOM_S


def test_what_has_no_first_token_is_not_counted(engine: RunningEngine) -> None:
    """Answers that are sent whole, errors, and the gaps between the frames of several sequences."""
    before = engine.metrics()
    assert engine.complete(8).status_code == 200
    asked = {"model": "none", "prompt": "one", "max_tokens": 4, "stream": True}
    wrong = engine.session.post(f"{engine.url}/v1/completions", json=asked, timeout=300)
    assert wrong.status_code == 404
    (several,) = asyncio.run(all_streamed(engine, [("/v1/completions", "standard")], n=3))
    after = engine.metrics()
    assert len(several.times) > TOKENS
    assert gained(before, after, f"{TTFT}_count", "standard") == 1
    assert gained(before, after, f"{ITL}_count", "standard") == 0


pytestmark = pytest.mark.timeout(1200)
