"""What a body is estimated at by the gateway and by the batch service, beside what an engine would run."""

from __future__ import annotations

import functools
import io
import json
import math
from typing import Any, NamedTuple

import pytest

from fleetkeeper_contract.bodies.media import MEDIA_TOKENS
from fleetkeeper_contract.bodies.reader import read_body
from fleetkeeper_engine.in_vllm.http.request_shape import shape_of
from fleetkeeper_gateway.batch.validation.worker import check_file
from fleetkeeper_gateway.http.request_fields import parse_fields
from fleetkeeper_gateway.limits import estimate_tokens

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CAP = 4096
estimate = functools.partial(estimate_tokens, cap=CAP)


class Runs(NamedTuple):
    """What an engine would run of a body, as vLLM's request classes have it."""

    answer_tokens: int
    numbers: int = 0
    """Tokens of a prompt that come as numbers."""
    media: int = 0
    encoded_bytes: int = 0
    """Of media: bytes that are no text."""


def image(size: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}


def messages(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]}]


SOUND = {"type": "input_audio", "input_audio": {"data": "A" * 300_000, "format": "wav"}}
TEXT = {"type": "text", "text": "data:image/png;base64," + "A" * 4000}

CASES: list[tuple[str, dict[str, Any], Runs]] = [
    # The field that the engine obeys on that path, and no other.
    (COMPLETIONS, {"max_completion_tokens": 1, "max_tokens": 4000}, Runs(4000)),
    (COMPLETIONS, {"max_completion_tokens": 0, "max_tokens": 4096}, Runs(4096)),
    (COMPLETIONS, {"max_output_tokens": 1, "max_tokens": 70}, Runs(70)),
    (COMPLETIONS, {}, Runs(16)),
    (COMPLETIONS, {"max_tokens": None}, Runs(CAP)),
    (CHAT, {"max_completion_tokens": 7}, Runs(7)),
    (CHAT, {"max_tokens": 7}, Runs(7)),
    (CHAT, {"max_completion_tokens": None, "max_tokens": 7}, Runs(7)),
    (CHAT, {"max_output_tokens": 7}, Runs(CAP)),
    (CHAT, {}, Runs(CAP)),
    (RESPONSES, {"max_output_tokens": 7, "max_tokens": 1}, Runs(7)),
    (RESPONSES, {"max_tokens": 1}, Runs(CAP)),
    # Two could be meant: older versions of vLLM take the other one in place of a zero.
    (CHAT, {"max_completion_tokens": 0, "max_tokens": 4000}, Runs(4000)),
    (CHAT, {"max_completion_tokens": 8, "max_tokens": 1}, Runs(8)),
    # Numbers as vLLM reads them.
    (CHAT, {"max_tokens": "100"}, Runs(100)),
    (CHAT, {"max_tokens": " 1_00.0 "}, Runs(100)),
    (CHAT, {"max_tokens": 100.0}, Runs(100)),
    (CHAT, {"max_tokens": "many"}, Runs(CAP)),
    (CHAT, {"max_tokens": 10, "n": "64"}, Runs(640)),
    (CHAT, {"max_tokens": 10, "n": 64.0}, Runs(640)),
    (COMPLETIONS, {"max_tokens": 10, "best_of": 64, "n": 1}, Runs(640)),
    # Prompts times choices.
    (COMPLETIONS, {"prompt": [f"question {i}" for i in range(50)], "max_tokens": 100}, Runs(5000)),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 100, "n": 3}, Runs(600)),
    (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 100, "n": 3}, Runs(300)),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2, "n": "64", "best_of": 65}, Runs(260)),
    (COMPLETIONS, {"prompt_embeds": ["AAAA", "AAAA"], "prompt": None, "max_tokens": 5}, Runs(10)),
    (COMPLETIONS, {"prompt": [7] * 30_000, "max_tokens": 1}, Runs(1, 30_000)),
    (COMPLETIONS, {"prompt": [[7] * 99] * 500, "max_tokens": 1}, Runs(500, 49_500)),
    (RESPONSES, {"input": ["a", "b"], "max_output_tokens": 5, "n": 9}, Runs(5)),
    ("/v1/embeddings", {"input": ["a", "b"], "max_tokens": 8}, Runs(0)),
    ("/v1/embeddings", {"input": [[1, 2]] * 100}, Runs(0, 200)),
    # Encoded media is no text, and text is no media.
    (CHAT, {"max_tokens": 50, "messages": messages(image(400_000))}, Runs(50, 0, 1, 400_022)),
    (CHAT, {"max_tokens": 50, "messages": messages(image(40))}, Runs(50, 0, 1, 62)),
    (CHAT, {"max_tokens": 5, "messages": messages(image(9), SOUND)}, Runs(5, 0, 2, 31 + 300_000)),
    (CHAT, {"max_tokens": 5, "messages": messages(TEXT)}, Runs(5)),
    (
        RESPONSES,
        {"max_output_tokens": 5, "input": [{"role": "user", "content": [{"image_url": "data:" + "A" * 9000}]}]},
        Runs(5, 0, 1, 9005),
    ),
]  # fmt: skip


def gateway_estimate(path: str, data: bytes) -> int:
    return estimate(*parse_fields(data, None, path).asked)


def batch_estimate(path: str, body: bytes) -> int:
    line = b'{"custom_id":"1","method":"POST","url":"%b","body":%b}\n' % (path.encode(), body)
    findings = check_file(io.BytesIO(line), path, max_lines=1, max_line_bytes=len(line))
    assert findings.mistakes == []
    (found,) = findings.found_lines(0, 1)
    return estimate(*found.asked)


@pytest.mark.parametrize("padding", [0, 100_000])
@pytest.mark.parametrize(("path", "fields", "runs"), CASES)
def test_gateway_and_batch_service_estimate_what_an_engine_would_run(
    path: str, fields: dict[str, Any], runs: Runs, padding: int
) -> None:
    """From one reader, for small and for large bodies."""
    prompt = {} if "messages" in fields or "input" in fields else {"prompt": "hi"}
    body = {"model": "m", **prompt, "user": "u" * padding, **fields}
    data = json.dumps(body, separators=(",", ":")).encode()
    text = math.ceil((len(data) - runs.encoded_bytes) / 4)
    expected = max(text, runs.numbers) + runs.media * MEDIA_TOKENS + runs.answer_tokens
    assert gateway_estimate(path, data) == expected
    assert batch_estimate(path, data) == expected
    if path != "/v1/embeddings":
        assert runs.answer_tokens % shape_of(read_body(data), path).sequences == 0
