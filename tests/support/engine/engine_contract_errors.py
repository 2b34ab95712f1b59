"""What every engine refuses, with which status, type and parameter: vLLM or a simulated one."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import requests

from tests.support.engine.engine_contract import CHAT, COMPLETIONS, chat, completion, post
from tests.support.engine.supervised_engine import RunningEngine
from tests.support.guards import GUARD_S


class Refused(NamedTuple):
    """A request, and how it is refused."""

    path: str
    body: dict[str, Any]
    status: int
    kind: str
    param: str | None


BAD, INVALID = "BadRequestError", "Bad Request"
REFUSED = {
    "unknown model": Refused(COMPLETIONS, completion(model="other"), 404, "NotFoundError", "model"),
    "unknown model of a chat": Refused(CHAT, chat(model="other"), 404, "NotFoundError", "model"),
    "unknown model to tokenize": Refused(
        "/tokenize", {"model": "other", "prompt": "a"}, 404, "NotFoundError", "model"
    ),
    "prompt above the context": Refused(
        COMPLETIONS, completion(prompt=[5] * 3000), 400, BAD, "input_tokens"
    ),
    "prompt that leaves no token": Refused(
        COMPLETIONS, completion(prompt=[5] * 2048), 400, BAD, "max_tokens"
    ),
    "text far above the context": Refused(
        COMPLETIONS, completion(prompt="word " * 40_000), 400, BAD, "input_text"
    ),
    "no prompt": Refused(COMPLETIONS, {"model": "tiny"}, 400, BAD, "prompt"),
    "empty prompt": Refused(COMPLETIONS, completion(prompt=""), 400, BAD, "prompt"),
    "no prompts": Refused(COMPLETIONS, completion(prompt=[]), 400, BAD, None),
    "no messages": Refused(CHAT, {"model": "tiny"}, 400, INVALID, "body.messages"),
    "empty conversation": Refused(CHAT, chat(messages=[]), 400, BAD, None),
    "messages that are a text": Refused(CHAT, chat(messages="hi"), 400, INVALID, "body.messages"),
    "image for a text model": Refused(
        CHAT,
        chat(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://host/a.png"}}],
                }
            ]
        ),
        400,
        BAD,
        None,
    ),
    "max_tokens 0": Refused(COMPLETIONS, completion(0), 400, BAD, "max_tokens"),
    "max_tokens below 0": Refused(COMPLETIONS, completion(-1), 400, BAD, "max_tokens"),
    "max_tokens as a word": Refused(
        COMPLETIONS, completion(max_tokens="x"), 400, INVALID, "body.max_tokens"
    ),
    "min_tokens above max_tokens": Refused(
        COMPLETIONS, completion(2, min_tokens=5), 400, BAD, None
    ),
    "temperature 3": Refused(COMPLETIONS, completion(temperature=3), 400, BAD, "temperature"),
    "temperature below 0": Refused(CHAT, chat(temperature=-1), 400, BAD, "temperature"),
    "top_p 0": Refused(COMPLETIONS, completion(top_p=0), 400, BAD, "top_p"),
    "top_k -5": Refused(COMPLETIONS, completion(top_k=-5), 400, BAD, None),
    "n 0": Refused(COMPLETIONS, completion(n=0), 400, BAD, None),
    "n null": Refused(COMPLETIONS, completion(n=None), 400, INVALID, "body.n"),
    "seed as a word": Refused(COMPLETIONS, completion(seed="x"), 400, INVALID, "body.seed"),
    "empty stop text": Refused(COMPLETIONS, completion(stop=[""]), 400, BAD, None),
    "too many logprobs": Refused(COMPLETIONS, completion(logprobs=100), 400, BAD, "logprobs"),
    "top_logprobs alone": Refused(CHAT, chat(top_logprobs=2), 400, BAD, "top_logprobs"),
    "stream_options without a stream": Refused(
        COMPLETIONS, completion(stream_options={"include_usage": True}), 400, BAD, "stream_options"
    ),
    "tools without a parser": Refused(
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        400,
        BAD,
        None,
    ),
    "unknown token": Refused(COMPLETIONS, completion(prompt=[999_999_999]), 400, BAD, None),
    "nothing to tokenize": Refused("/tokenize", {"model": "tiny"}, 400, INVALID, "body.prompt"),
    "token as a word": Refused(
        "/detokenize", {"model": "tiny", "tokens": ["a"]}, 400, INVALID, "body.tokens.0"
    ),
    "token below 0": Refused(
        "/detokenize", {"model": "tiny", "tokens": [-1]}, 400, INVALID, "body.tokens.0"
    ),
}
UNREADABLE = {
    "cut off": b'{"model": "tiny", "prompt"',
    "a list": b"[1, 2]",
    "nothing": b"",
    "a byte order mark": b'\xef\xbb\xbf{"model": "tiny", "prompt": "a"}',
    "a name twice": b'{"model": "tiny", "prompt": "a", "prompt": "b"}',
}
"""Bodies that the middleware refuses, so that all readers of a request read the same."""


def error_of(answer: requests.Response) -> dict[str, Any]:
    """Return the error of an answer. It is whole, and says its status."""
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    assert error["message"]
    return error


def sent(engine: RunningEngine, body: bytes, media: str) -> requests.Response:
    """Return the answer to a body as it is."""
    url = f"{engine.url}{COMPLETIONS}"
    return requests.post(url, data=body, headers={"Content-Type": media}, timeout=GUARD_S)


class ErrorsContract:
    """Requests that are refused."""

    @pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
    def test_a_wrong_request_is_refused_as_by_vllm(
        self, engine: RunningEngine, case: Refused
    ) -> None:
        answer = post(engine, case.path, case.body)
        error = error_of(answer)
        assert (answer.status_code, error["type"], error["param"]) == case[2:]

    @pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
    def test_an_unreadable_body_is_refused(self, engine: RunningEngine, body: bytes) -> None:
        answer = sent(engine, body, "application/json")
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["code"] in {"invalid_json", "encoding_not_supported", "duplicate_field"}

    def test_a_body_of_another_type_is_refused_as_by_vllm(self, engine: RunningEngine) -> None:
        answer = sent(engine, b'{"model": "tiny", "prompt": "a"}', "text/plain")
        error = error_of(answer)
        assert (answer.status_code, error["type"], error["param"]) == (400, INVALID, None)

    def test_numbers_may_be_texts_and_unknown_fields_are_ignored(
        self, engine: RunningEngine
    ) -> None:
        answer = post(engine, COMPLETIONS, completion(max_tokens="3", no_such_field=1))
        assert answer.json()["usage"]["completion_tokens"] == 3

    def test_a_long_prompt_leaves_less_for_the_answer(self, engine: RunningEngine) -> None:
        answer = post(engine, COMPLETIONS, completion(20, prompt=[5] * 2040))
        assert answer.json()["usage"]["completion_tokens"] == 8

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", COMPLETIONS, 405),
            ("POST", "/v1/models", 405),
            ("GET", "/v1/models/tiny", 404),
            ("POST", "/v1/embeddings", 404),
        ],
    )
    def test_a_route_that_a_text_model_lacks_is_not_found(
        self, engine: RunningEngine, method: str, path: str, status: int
    ) -> None:
        answer = requests.request(
            method, f"{engine.url}{path}", json={"model": "tiny", "input": "a"}, timeout=GUARD_S
        )
        assert answer.status_code == status
        assert answer.json().keys() == {"detail"}
