"""What every engine does under the real supervisor, be it vLLM or a simulated one.

`tests/simulated` and `tests/engine/test_contract.py` run these classes with their own fixture `engine`.
Whatever a real engine shows and the simulated one did not becomes a case here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from select import select
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from fleetkeeper_engine.shm.ledger import FILE as LEDGER_FILE
from fleetkeeper_engine.shm.ledger import Entry, LedgerReader, Tokens
from tests.support.engine.supervised_engine import RunningEngine
from tests.support.guards import GUARD_S

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONVERSATION = [{"role": "user", "content": "Hello there"}]
IDLE_S = 7.0
"""By default vLLM closes an idle connection after 5 s."""
USAGE = {
    "prompt_tokens",
    "total_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "completion_tokens_details",
}
ANSWER = {
    "id",
    "object",
    "created",
    "model",
    "choices",
    "service_tier",
    "system_fingerprint",
    "usage",
}
VLLMS_OWN = {"kv_transfer_params", "ec_transfer_params", "metrics"}
CHOICE = {"index", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"}
PROMPTS_OWN = {"prompt_logprobs", "prompt_token_ids"}
READ_BY_US = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:iteration_tokens_total_bucket",
)
"""Series of vLLM that our code, dashboards and the router read, or that users chart."""


def post(engine: RunningEngine, path: str, body: object, **more: Any) -> requests.Response:
    """Send a request with its own connection: the session's are not for several threads."""
    return requests.post(f"{engine.url}{path}", json=body, timeout=GUARD_S, **more)


def completion(tokens: int = 4, **fields: object) -> dict[str, Any]:
    """Return the body of a completion with exactly so many tokens."""
    known = {"model": "tiny", "prompt": "one two three", "max_tokens": tokens, "ignore_eos": True}
    return {**known, **fields}


def chat(tokens: int = 4, **fields: object) -> dict[str, Any]:
    """Return the body of a chat with exactly so many tokens."""
    known = {"model": "tiny", "messages": CONVERSATION, "max_tokens": tokens, "ignore_eos": True}
    return {**known, **fields}


def frames(answer: requests.Response) -> list[dict[str, Any]]:
    """Return the frames of a stream, which ends with [DONE]."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *found, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in found]


def with_usage(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request for a stream that ends with its usage."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def vllm_metrics(engine: RunningEngine) -> dict[str, float]:
    """Return the sum of each of vLLM's series, by name."""
    found: dict[str, float] = {}
    for series, value in engine.metrics().items():
        name = series.partition("{")[0]
        if name.startswith("vllm:"):
            found[name] = found.get(name, 0.0) + value
    return found


def counted(engine: RunningEngine) -> Tokens:
    """Return the tokens that vLLM's own counters say."""
    found = vllm_metrics(engine)
    names = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")
    return Tokens(*(int(found[f"vllm:{name}_total"]) for name in names))


def entries(engine: RunningEngine) -> list[Entry]:
    """Return everything in the engine's ledger."""
    assert engine.run_directory is not None
    reader = LedgerReader.open(engine.run_directory / LEDGER_FILE)
    assert reader is not None
    with reader:
        head = reader.head()
        assert head is not None
        assert (head.errors, head.counting) == (0, True)
        return [entry for _, entry, _ in reader.entries(1, head.newest)]


def next_entries(engine: RunningEngine, known: int, count: int) -> list[Entry]:
    """Return the entries after the known ones. The engine writes them after the answers."""
    engine.wait_for(
        lambda: len(entries(engine)) >= known + count,
        f"entries {known} to {known + count}",
        GUARD_S,
    )
    found = entries(engine)[known:]
    assert len(found) == count
    return found


def quiet(engine: RunningEngine) -> None:
    """Wait until nothing runs or waits, and the ledger has an entry for every answer before."""
    names = [f'fleetkeeper_{kind}{{tier="standard"}}' for kind in ("running", "waiting")]

    def is_quiet() -> bool:
        found = engine.metrics()
        return not any(found.get(name, 0.0) for name in names)

    engine.wait_for(is_quiet, "an engine without work", GUARD_S)
    # The event loop enters a request right after it has sent the end of its answer: before this one.
    requests.get(f"{engine.url}/health", timeout=GUARD_S)


@contextmanager
def running(engine: RunningEngine, count: int, **fields: object) -> Iterator[list[Any]]:
    """Keep so many streams running; yields their responses, which are closed afterwards."""
    body = with_usage(completion(1900, **fields))
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda _: post(engine, COMPLETIONS, body, stream=True), range(count)))
    try:
        assert {answer.status_code for answer in found} == {200}
        yield found
    finally:
        for answer in found:
            answer.close()
        quiet(engine)


class AnswersContract:
    """Whole answers: shapes, counts and texts."""

    def test_the_model_is_listed(self, engine: RunningEngine) -> None:
        answer = engine.session.get(f"{engine.url}/v1/models", timeout=GUARD_S)
        # An engine may also list adapters.
        (card,) = (card for card in answer.json()["data"] if card["id"] == "tiny")
        known = {
            name: card[name] for name in ("id", "object", "owned_by", "parent", "max_model_len")
        }
        assert known == {
            "id": "tiny",
            "object": "model",
            "owned_by": "vllm",
            "parent": None,
            "max_model_len": 2048,
        }

    def test_a_completion_has_vllms_fields(self, engine: RunningEngine) -> None:
        answer = post(engine, COMPLETIONS, completion(5)).json()
        assert answer.keys() == ANSWER | VLLMS_OWN
        assert answer["usage"].keys() == USAGE
        (choice,) = answer["choices"]
        assert choice.keys() == CHOICE | PROMPTS_OWN | {"text"}
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["system_fingerprint"]
        assert answer["id"].startswith("cmpl-")

    def test_a_chat_has_vllms_fields(self, engine: RunningEngine) -> None:
        answer = post(engine, CHAT, chat(5)).json()
        assert answer.keys() == ANSWER | VLLMS_OWN | PROMPTS_OWN | {"prompt_text"}
        (choice,) = answer["choices"]
        assert choice.keys() == CHOICE | {"message"}
        assert choice["message"]["role"] == "assistant"
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["id"].startswith("chatcmpl-")

    def test_each_prompt_gets_n_answers_and_counts_once(self, engine: RunningEngine) -> None:
        prompts = ["one two three", "four"]
        answer = post(engine, COMPLETIONS, completion(3, prompt=prompts, n=2)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        alone = sum(
            post(engine, COMPLETIONS, completion(1, prompt=prompt)).json()["usage"]["prompt_tokens"]
            for prompt in prompts
        )
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (alone, 12)

    def test_tokens_of_a_prompt_count_as_given(self, engine: RunningEngine) -> None:
        usage = post(engine, COMPLETIONS, completion(2, prompt=[5, 6, 7, 8])).json()["usage"]
        assert usage["prompt_tokens"] == 4

    @pytest.mark.parametrize(
        ("path", "body", "prompt"),
        [
            (COMPLETIONS, completion(1), {"prompt": "one two three"}),
            (CHAT, chat(1), {"messages": CONVERSATION}),
        ],
    )
    def test_tokenize_says_what_usage_counts(
        self, engine: RunningEngine, path: str, body: dict[str, Any], prompt: dict[str, Any]
    ) -> None:
        found = post(engine, "/tokenize", {"model": "tiny", **prompt}).json()
        assert found.keys() == {"count", "max_model_len", "tokens", "token_strs"}
        assert len(found["tokens"]) == found["count"]
        # vllm-router reads them as 32 bits. With larger ones it does not know which prompts begin alike.
        assert all(0 <= token < 2**31 for token in found["tokens"])
        assert post(engine, path, body).json()["usage"]["prompt_tokens"] == found["count"]

    def test_detokenize_returns_the_text(self, engine: RunningEngine) -> None:
        asked = {"model": "tiny", "prompt": "one two three", "add_special_tokens": False}
        tokens = post(engine, "/tokenize", asked).json()["tokens"]
        found = post(engine, "/detokenize", {"model": "tiny", "tokens": tokens}).json()
        assert found == {"prompt": "one two three"}

    @pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 7}])
    def test_the_same_request_gets_the_same_text(
        self, engine: RunningEngine, fields: dict[str, object]
    ) -> None:
        texts = {
            post(engine, COMPLETIONS, completion(12, **fields)).json()["choices"][0]["text"]
            for _ in range(3)
        }
        assert len(texts) == 1

    def test_another_seed_gets_another_text(self, engine: RunningEngine) -> None:
        texts = {
            post(engine, COMPLETIONS, completion(12, seed=seed)).json()["choices"][0]["text"]
            for seed in range(4)
        }
        assert len(texts) == 4

    def test_a_stop_text_ends_an_answer_before_it(self, engine: RunningEngine) -> None:
        whole = post(engine, COMPLETIONS, completion(24, temperature=0)).json()["choices"][0][
            "text"
        ]
        stop = whole[len(whole) // 2 :][:6]
        body = completion(24, temperature=0, stop=[stop])
        (choice,) = post(engine, COMPLETIONS, body).json()["choices"]
        assert choice["text"] == whole[: whole.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)

    def test_a_completion_can_have_logprobs(self, engine: RunningEngine) -> None:
        (choice,) = post(engine, COMPLETIONS, completion(2, logprobs=1)).json()["choices"]
        found = choice["logprobs"]
        assert found.keys() == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
        assert {len(part) for part in found.values()} == {2}

    def test_a_prompt_is_found_in_the_prefix_cache(self, engine: RunningEngine) -> None:
        """Blocks are of at most 128 tokens: most of a prompt of 1,000 is found the second time."""
        before = counted(engine)
        for _ in range(2):
            post(engine, COMPLETIONS, completion(1, prompt=list(range(10, 1010))))
        after = counted(engine)
        assert after.prompt - before.prompt == 2000
        assert after.cached - before.cached >= 800


class StreamsContract:
    """Streamed answers."""

    def test_a_stream_says_the_same_as_a_whole_answer(self, engine: RunningEngine) -> None:
        body = completion(9, temperature=0)
        whole = post(engine, COMPLETIONS, body).json()
        *deltas, last = frames(post(engine, COMPLETIONS, with_usage(body)))
        text = "".join(delta["choices"][0]["text"] for delta in deltas)
        assert text == whole["choices"][0]["text"]
        assert [delta["choices"][0]["finish_reason"] for delta in deltas][-1] == "length"
        assert last["choices"] == []
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][name] == whole["usage"][name]
        assert last["system_fingerprint"] == whole["system_fingerprint"]

    def test_a_chat_begins_with_its_role(self, engine: RunningEngine) -> None:
        first, *deltas = frames(post(engine, CHAT, chat(5, stream=True)))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {delta["object"] for delta in deltas} == {"chat.completion.chunk"}
        assert deltas[-1]["choices"][0]["finish_reason"] == "length"
        assert "usage" not in deltas[-1]
        assert deltas[-1]["system_fingerprint"]

    def test_each_frame_can_say_the_usage_so_far(self, engine: RunningEngine) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = completion(6, stream=True, stream_options=options)
        found = frames(post(engine, COMPLETIONS, body))
        said = [frame["usage"]["completion_tokens"] for frame in found]
        assert said == sorted(said)
        assert said[-1] == 6

    def test_n_streams_are_told_apart(self, engine: RunningEngine) -> None:
        found = frames(post(engine, CHAT, chat(4, stream=True, n=2)))
        ends = [
            choice["index"]
            for frame in found
            for choice in frame["choices"]
            if choice["finish_reason"] is not None
        ]
        assert sorted(ends) == [0, 1]

    def test_an_idle_connection_stays_open(self, engine: RunningEngine) -> None:
        """A router closes it after 3 s, and may be seconds late: a request must not meet the engine's end of it."""
        address = urlsplit(engine.url)
        connection = HTTPConnection(str(address.hostname), address.port, timeout=GUARD_S)
        with closing(connection):
            for _ in range(2):
                connection.request("GET", "/v1/models")
                answer = connection.getresponse()
                assert answer.status == 200
                answer.read()
                assert connection.sock is not None, "the engine closes each connection"
                ended, _, _ = select([connection.sock], [], [], IDLE_S)
                assert not ended, f"closed within {IDLE_S} idle seconds"

    def test_frames_can_hold_several_tokens(self, engine: RunningEngine) -> None:
        body = completion(16, stream_interval=8)
        assert len(frames(post(engine, COMPLETIONS, with_usage(body)))) <= 5

    def test_a_client_that_hangs_up_ends_its_sequence(self, engine: RunningEngine) -> None:
        quiet(engine)
        known = len(entries(engine))
        with running(engine, 3):
            pass
        found = next_entries(engine, known, 3)
        assert all(entry.aborted and entry.tokens.answer < 1900 for entry in found)
