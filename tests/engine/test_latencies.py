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
from tests.support.supervised_engine import RunningEngine

TTFT, ITL = "fleetkeeper_time_to_first_token_seconds", "fleetkeeper_inter_token_latency_seconds"
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
ROOM_S = 0.25
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


@pytest.mark.parametrize("path", list(ROUTES))
def test_the_histograms_hold_what_the_client_measured(engine: RunningEngine, path: str) -> None:
    """Every stream one TTFT, every frame with tokens after it one gap, in the tier of the request.

    The client sees a frame a little later, by what lies between it and the middleware.
    """
    tiers = ["realtime", "standard", "standard", "batch"]
    before = engine.metrics()
    seen = asyncio.run(all_streamed(engine, [(path, tier) for tier in tiers]))
    after = engine.metrics()
    for tier in ("realtime", "standard", "batch"):
        mine = [found for found, of in zip(seen, tiers, strict=True) if of == tier]
        firsts = [found.times[0] for found in mine]
        gaps = sum(len(found.times) - 1 for found in mine)
        spans = sum(found.times[-1] - found.times[0] for found in mine)
        counted_s, gaps_s = (gained(before, after, f"{n}_sum", tier) for n in (TTFT, ITL))
        print(
            f"{path} {tier}: TTFT {counted_s / len(mine):.4f} s, client {sum(firsts) / len(mine):.4f} s; "
            f"ITL {1e3 * gaps_s / gaps:.2f} ms, client {1e3 * spans / gaps:.2f} ms, {gaps} gaps, "
            f"{mine[0].others} other events"
        )
        assert gaps >= len(mine) * TOKENS / 4, "frames hold a few tokens at most"
        assert gained(before, after, f"{TTFT}_count", tier) == len(mine)
        assert gained(before, after, f"{ITL}_count", tier) == gaps
        assert 0 < counted_s <= sum(firsts)
        assert counted_s == pytest.approx(sum(firsts), abs=ROOM_S * len(mine))
        assert gaps_s == pytest.approx(spans, abs=ROOM_S * len(mine))
        # All are within the edge that holds the client's slowest.
        place = bisect_left(TIME_TO_FIRST_TOKEN_EDGES_S, max(firsts))
        edge = TIME_TO_FIRST_TOKEN_EDGES_S[place]
        assert within(after, edge, tier) - within(before, edge, tier) == len(mine)


def test_what_has_no_first_token_is_not_counted(engine: RunningEngine) -> None:
    """Answers that are sent whole, errors, and the gaps between the frames of several sequences."""
    before = engine.metrics()
    assert engine.complete(8).status_code == 200
    asked = {"model": "none", "prompt": "one", "max_tokens": 4, "stream": True}
    wrong = engine.session.post(f"{engine.url}/v1/completions", json=asked, timeout=60)
    assert wrong.status_code == 404
    (several,) = asyncio.run(all_streamed(engine, [("/v1/completions", "standard")], n=3))
    after = engine.metrics()
    assert len(several.times) > TOKENS
    assert gained(before, after, f"{TTFT}_count", "standard") == 1
    assert gained(before, after, f"{ITL}_count", "standard") == 0


pytestmark = pytest.mark.timeout(1200)
