"""A body never stops the event loop that answers probes, nor fills memory, nor holds a place by coming slowly."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from fleetkeeper_contract.bodies.outline import PART_BYTES
from fleetkeeper_contract.bodies.refused import MAX_DEPTH, MAX_VALUES
from fleetkeeper_engine.in_vllm.http.bodies import BodyLimits
from fleetkeeper_engine.in_vllm.http.request_shape import MAX_MESSAGES
from tests.support.engine.middleware_calls import (
    Call,
    StandInVllm,
    assert_nothing_left,
    running_middleware,
)

MIB = 1024**2
CHAT = "/v1/chat/completions"


def many(value: bytes, size: int) -> bytes:
    return value + (b"," + value) * (size // (len(value) + 1))


def deep(levels: int, inside: bytes = b"") -> bytes:
    return b'{"prompt": "x", "x": ' + b"[" * levels + inside + b"]" * levels + b"}"


HOSTILE = {
    "brackets": (b'{"prompt": [' + many(b"[]", 8 * MIB) + b"]}", "too_many_values"),
    "objects": (b'{"prompt": [' + many(b"{}", 8 * MIB) + b"]}", "too_many_values"),
    "short texts": (b'{"stop": [' + many(b'""', 8 * MIB) + b"]}", "too_many_values"),
    "fractions": (b'{"x": [' + many(b"0.5", 8 * MIB) + b"]}", "too_many_values"),
    "numbers in a conversation": (
        b'{"messages": [' + many(b"0", 8 * MIB) + b"]}",
        "too_many_values",
    ),
    "numbers in pairs": (b'{"x": [' + many(b"[1,2]", 8 * MIB) + b"]}", "too_many_values"),
    "small and wrong": (b'{"messages": [' + many(b"0", 40_000) + b"]}", "too_many"),
    "small and empty": (b'{"messages": [' + many(b"{}", 3000) + b"]}", "invalid_message"),
    "small and wrong parts": (
        b'{"messages": [{"role": "user", "content": [' + many(b"0", 20_000) + b"]}]}",
        "invalid_message",
    ),
    "deep": (deep(MAX_DEPTH + 1), "too_deep"),
    "deeper than Python": (deep(9000), "too_deep"),
    "deep and open": (b"[" * 8 * MIB, ""),
    "UTF-16": (json.dumps({"prompt": "x" * MIB}).encode("utf-16"), "encoding_not_supported"),
    "no JSON": (b'{"prompt": "' + b"x" * MIB, "invalid_json"),
}


@pytest.mark.promise("bounded-requests")
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_body_is_refused_before_vllm_and_holds_nothing(name: str) -> None:
    """vLLM would parse and validate it in the event loop, for seconds."""
    body, code = HOSTILE[name]
    vllm = StandInVllm()
    with running_middleware(vllm) as app:
        status, _, told = await Call(app, body, path=CHAT).answer()
        assert status == 400
        assert code in told["error"]["code"]
        assert vllm.taken == []
        assert_nothing_left(app)


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_part_of_a_hostile_body_holds_the_event_loop(name: str) -> None:
    """Others have their turn after each part: between two turns lies one part, never the body."""
    body, _ = HOSTILE[name]
    turns: list[int] = []
    with running_middleware(StandInVllm()) as app:
        call = Call(app, body, path=CHAT)
        while not call.task.done():
            turns.append(call._inbox.qsize())
            await asyncio.sleep(0)
    # Parts that are taken in one turn: as many as are gathered before the first is looked at.
    assert max((a - b for a, b in pairwise(turns)), default=0) <= 2


LEGITIMATE: dict[str, dict[str, Any]] = {
    "a long text": {"prompt": 'word "quoted" \\ and\nmore ' * 200_000, "n": 3},
    "token numbers": {"prompt": list(range(400_000)), "n": 3},
    "lists of token numbers": {"prompt": [list(range(100_000))] * 3},
    "an image": {"messages": [{"role": "user", "content": [{"image_url": "A" * MIB}]}], "n": 3},
    "a long conversation": {
        "messages": [{"role": "user", "content": "w " * 50}] * MAX_MESSAGES,
        "n": 3,
    },
    "many tools": {"tools": [{"f": {"p": {"a": "b" * 300}}}] * 900, "priority": -5, "n": 3},
}


@pytest.mark.parametrize("name", LEGITIMATE)
async def test_a_large_legitimate_body_reaches_vllm_with_our_priority_and_its_count(
    name: str,
) -> None:
    """Byte by byte as it came, but for the priority at its end."""
    fields = LEGITIMATE[name]
    body = json.dumps(fields).encode()
    assert len(body) > PART_BYTES
    vllm = StandInVllm()
    vllm.go.clear()
    path = CHAT if "messages" in fields or "tools" in fields else "/v1/completions"
    with running_middleware(vllm) as app:
        call = Call(app, body, path=path)
        await vllm.until_taken(1)
        assert sum(state.held for state in app._admission.tiers) == 3
        assert app._bodies.held == 0, "vLLM has it now"
        vllm.go.set()
        assert (await call.answer())[0] == 200
        assert_nothing_left(app)
    taken = json.loads(vllm.taken[0])
    assert taken.pop("priority") != -5
    assert taken == {k: v for k, v in fields.items() if k != "priority"}
    assert vllm.taken[0].startswith(body.rstrip()[:-1])


async def test_a_body_above_its_bytes_is_refused_by_its_length_and_by_its_parts() -> None:
    """A declared length costs no byte; what comes without one is refused at the first byte too many."""
    vllm = StandInVllm()
    with running_middleware(vllm, bodies=BodyLimits(request_bytes=100_000)) as app:
        declared = Call(app, b"x" * 100_001, headers=[(b"content-length", b"100001")])
        status, headers, told = await declared.answer()
        assert (status, headers["connection"], told["error"]["code"]) == (
            413,
            "close",
            "body_too_large",
        )
        assert "100000 bytes" in told["error"]["message"]
        assert declared._inbox.empty(), "read to its end: a client that still sends reads no answer"
        assert (await Call(app, b" " * 100_001).answer())[0] == 413
        assert vllm.taken == []
        assert_nothing_left(app)


async def test_who_sends_a_refused_body_without_end_is_answered_after_its_time() -> None:
    """What is refused is read on for so long, and holds no bytes meanwhile."""
    now = [1000.0]
    limits = BodyLimits(request_bytes=100_000)
    with running_middleware(StandInVllm(), bodies=limits, clock=lambda: now[0]) as app:
        call = Call(app, None)
        call.feed(b"x" * 100_001)
        async with asyncio.timeout(60):
            while not call._inbox.empty():  # noqa: ASYNC110 - a queue that was read has no event
                await asyncio.sleep(0)
        assert not call.task.done()
        assert app._bodies.held == 0
        now[0] += 11.0
        status, _, told = await call.answer()
        assert (status, told["error"]["code"]) == (413, "body_too_large")
        assert_nothing_left(app)


async def test_large_bodies_together_leave_room_to_small_ones() -> None:
    """They are answered 429, which no router takes for a failing replica."""
    vllm = StandInVllm()
    vllm.go.clear()
    with running_middleware(vllm, bodies=BodyLimits(total_bytes=400_000)) as app:
        half_sent = [Call(app, None) for _ in range(2)]
        for call in half_sent:
            call.feed(b'{"prompt": "' + b"x" * 140_000)
        async with asyncio.timeout(60):
            while app._bodies.held < 280_000:  # noqa: ASYNC110 - the state of a queue has no event
                await asyncio.sleep(0)
        large = Call(app, b'{"prompt": "' + b"x" * 140_000 + b'"}')
        status, headers, told = await large.answer()
        assert (status, told["error"]["code"], headers["retry-after"]) == (429, "bodies_full", "1")
        vllm.go.set()
        assert (await Call(app).answer())[0] == 200
        for call in half_sent:
            call.hang_up()
            await call.task
        assert_nothing_left(app)


async def test_a_slow_sender_holds_no_place_and_is_cut() -> None:
    """One byte a second: the queue does not know of it, and after its time it is answered 408."""
    now = [1000.0]
    vllm = StandInVllm()
    with running_middleware(vllm, max_sequences=1, clock=lambda: now[0]) as app:
        slow = [Call(app, None) for _ in range(50)]
        headers_only = Call(app, None)
        await asyncio.sleep(0)
        for _ in range(9):
            now[0] += 1.0
            for call in slow:
                call.feed(b"{")
            await asyncio.sleep(0)
        assert app._admission.unfinished == 0
        assert (await Call(app).answer())[0] == 200, "others pass"
        now[0] += 2.0
        for call in [*slow, headers_only]:
            status, headers, told = await call.answer()
            assert (status, headers["connection"]) == (408, "close")
            assert told["error"]["code"] == "body_too_slow"
        assert_nothing_left(app)


async def test_the_tokenizer_works_for_two_at_a_time_and_others_wait_or_are_refused() -> None:
    """Its work is the API server's own; generation is not held up by it, nor counts it as work."""
    vllm = StandInVllm()
    vllm.go.clear()
    with running_middleware(vllm) as app:
        body = b'{"prompt": "x"}'
        calls = [Call(app, body, path="/tokenize") for _ in range(34)]
        await vllm.until_taken(2)
        async with asyncio.timeout(60):
            while app._lane.waiting < 32:  # noqa: ASYNC110 - the state of a queue has no event
                await asyncio.sleep(0)
        assert len(vllm.taken) == 2
        status, _, told = await Call(app, body, path="/detokenize").answer()
        assert (status, told["error"]["code"]) == (429, "queue_full")
        assert app._admission.unfinished == 0, "an engine with no step to make would look hung"
        calls[5].hang_up()
        await calls[5].task
        generation = Call(app)
        await vllm.until_taken(3)
        vllm.go.set()
        for call in [*calls[:5], *calls[6:], generation]:
            assert (await call.answer())[0] == 200
        assert vllm.taken[0] == body, "as it came"
        large = Call(app, b'{"prompt": "' + b"x" * 5 * MIB + b'"}', path="/tokenize")
        assert (await large.answer())[0] == 413
        assert_nothing_left(app)


async def test_the_bounds_allow_what_they_name() -> None:
    """The deepest and the most that is allowed goes through."""
    vllm = StandInVllm()
    with running_middleware(vllm) as app:
        assert (await Call(app, deep(MAX_DEPTH - 1)).answer())[0] == 200
        values = b'{"prompt": "x", "x": [' + many(b"0", 2 * (MAX_VALUES - 100)) + b"]}"
        assert (await Call(app, values).answer())[0] == 200
