"""One request's number of sequences never stops the others: it is counted as vLLM does, and bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fleetkeeper_contract.bodies.asked import whole
from fleetkeeper_contract.bodies.reader import read_body
from fleetkeeper_contract.bodies.refused import RefusedBodyError
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.admission.queue import Admission
from fleetkeeper_engine.in_vllm.http.admission.tickets import Ticket
from fleetkeeper_engine.in_vllm.http.request_shape import (
    MAX_POOLED,
    Shape,
    check_sequences,
    shape_of,
)
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.layout import SupervisorBlock
from tests.support.engine.middleware_calls import Call, StandInVllm, running_middleware
from tests.support.lanes import examples

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


def sequences(path: str, **fields: Any) -> int:
    return shape_of(read_body(json.dumps(fields).encode()), path).sequences


@pytest.mark.parametrize("value", [1000, "1000", 1000.0, "1000.0", " 1000 ", "1_000", "+1000"])
def test_choices_count_however_their_number_is_written(value: object) -> None:
    """vLLM's own models take each of these for 1000."""
    for path in (COMPLETIONS, CHAT):
        assert sequences(path, prompt="a", n=value) == 1000
    assert sequences(COMPLETIONS, prompt="a", best_of=value) == 1000


@pytest.mark.parametrize("value", [True, False, None, 0, -5, 1.5, "many", "", "1e3", [], {}])
def test_what_vllm_takes_for_one_or_refuses_counts_as_one(value: object) -> None:
    """A request that is refused anyway takes one place for that moment."""
    assert sequences(COMPLETIONS, prompt="a", n=value) == 1


@examples(300)
@given(
    st.text(st.sampled_from("0123456789+-_. \t\n\u00a0\u2009ex\u0663"), max_size=6)
    | st.integers()
    | st.floats(-1e6, 1e6)
    | st.booleans()
    | st.sampled_from(["0__9", "-0__0", "1_0.00"])
)
def test_a_number_that_pydantic_reads_counts_as_that_number(value: object) -> None:
    """vLLM's classes read it. What they refuse may count as anything."""
    try:
        number = TypeAdapter(int).validate_python(value)
    except ValidationError:
        return
    read = whole(read_body(json.dumps({"n": value}).encode()), value)
    assert max(1, read or 1) == max(1, number)


@pytest.mark.parametrize("value", [" " * 300 + "1000", "0" * 300 + "1000"])
@pytest.mark.parametrize("size", [1, 100_000])
async def test_a_number_hidden_in_a_long_text_is_refused(value: str, size: int) -> None:
    """vLLM strips spaces and zeros, any number of them."""
    vllm = StandInVllm()
    with running_middleware(vllm) as app:
        body = json.dumps({"n": value, "prompt": "x" * size}).encode()
        status, _, told = await Call(app, body).answer()
    assert (status, told["error"]["param"], vllm.taken) == (422, "n", [])


@pytest.mark.promise("bounded-requests")
@pytest.mark.parametrize(
    ("path", "fields", "counted"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 3}, 6),
        (COMPLETIONS, {"prompt": [1.0, 2.0, 3]}, 1),
        (COMPLETIONS, {"prompt": ["1", "2"]}, 2),
        (COMPLETIONS, {"prompt_embeds": ["x", "y"], "n": 2}, 4),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": ["x", "y"]}, 3),
        (COMPLETIONS, {"prompt": "a", "n": 4, "use_beam_search": True}, 4),
        (COMPLETIONS, {"prompt": "a", "input": ["ignored", "here"]}, 1),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 3, "n": 2}, 2),
        (EMBEDDINGS, {"input": [[1, 2], [3]], "n": 50}, 2),
        (EMBEDDINGS, {"messages": [[{"role": "user"}], [{"role": "user"}]]}, 2),
        ("/score", {"queries": "q", "items": ["a", "b", "c"]}, 3),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, 2),
        ("/v1/responses", {"input": [{"role": "user"}] * 4, "n": 9}, 1),
    ],
)
def test_sequences_are_those_that_vllm_makes_of_the_route(
    path: str, fields: dict[str, Any], counted: int
) -> None:
    """A field counts only where vLLM reads it."""
    assert sequences(path, **fields) == counted


def test_more_than_could_ever_run_at_once_is_refused_with_value_ceiling_and_advice() -> None:
    """Inputs of embeddings take one step each, so a request may list as many as OpenAI allows."""
    check_sequences(Shape(64, has_priority=False), COMPLETIONS, 64)
    with pytest.raises(RefusedBodyError) as refused:
        check_sequences(Shape(65, has_priority=False), COMPLETIONS, 64)
    assert (refused.value.status, refused.value.param) == (422, "n")
    for word in ("65 sequences", "at most 64", "split the request"):
        assert word in str(refused.value)
    check_sequences(Shape(MAX_POOLED, has_priority=False), EMBEDDINGS, 64)
    with pytest.raises(RefusedBodyError, match=f"at most {MAX_POOLED}"):
        check_sequences(Shape(MAX_POOLED + 1, has_priority=False), EMBEDDINGS, 64)


@pytest.mark.parametrize("value", [1000, "1000", 1000.0, 10**400])
async def test_a_thousand_choices_are_answered_422_and_others_go_on(value: object) -> None:
    """The queue does not wait until the pod is empty for what could never fit."""
    vllm = StandInVllm()
    vllm.go.clear()
    with running_middleware(vllm, max_sequences=16) as app:
        long = Call(app)
        await vllm.until_taken(1)
        status, _, body = await Call(app, json.dumps({"prompt": "x", "n": value}).encode()).answer()
        assert status == 422
        assert body["error"]["code"] == "too_many_sequences"
        assert body["error"]["param"] == "n"
        others = [Call(app) for _ in range(3)]
        await vllm.until_taken(4)
        vllm.go.set()
        assert {(await call.answer())[0] for call in [long, *others]} == {200}


def admission(**changes: Any) -> Admission:
    return Admission(VllmSettings(**{"max_sequences": 64, "min_sequences": 1, **changes}))


def enqueued(queue: Admission, tier: Tier, sequences: int, now: float) -> Ticket:
    ticket = queue.enqueue(tier, sequences, now, now)
    assert isinstance(ticket, Ticket)
    return ticket


@pytest.mark.parametrize("tier", [Tier.STANDARD, Tier.BATCH])
def test_a_large_request_is_released_beside_realtime_after_limits_were_lowered(tier: Tier) -> None:
    """64 sequences came when 64 could run; at a limit of 8 they need what their tier may hold, no more."""
    queue = admission()
    queue.refuse(Tier.REALTIME, None, 1.0)
    realtime = enqueued(queue, Tier.REALTIME, 1, 1.0)
    assert queue.release_ready(1.0) == [realtime]
    queue.apply_supervisor_block(SupervisorBlock(sequences=8, lease_deadline=1e9))
    large = enqueued(queue, tier, 64, 1.1)
    assert queue.release_ready(1.2) == [large]
    assert sum(state.held for state in queue.tiers) <= queue.room(1.2).total
    second = enqueued(queue, Tier.REALTIME, 1, 1.3)
    assert queue.release_ready(1.3) == [second], "the reserve of realtime stayed free"
    for ticket in (realtime, large, second):
        queue.finish(ticket, 2.0)
    assert [state.held for state in queue.tiers] == [0, 0, 0]


def test_batch_is_charged_at_most_its_share() -> None:
    """So that one request of batch leaves room to the others, however many choices it wants."""
    queue = admission(batch_share_percent=25)
    ticket = queue.try_admit_now(Tier.BATCH, 60, 1.0, 1.0)
    assert ticket is not None
    assert ticket.sequences == queue.tiers[Tier.BATCH].held == 16
    assert queue.try_admit_now(Tier.STANDARD, 48, 1.1, 1.1) is not None
    queue.finish(ticket, 2.0)
    assert queue.tiers[Tier.BATCH].held == 0
