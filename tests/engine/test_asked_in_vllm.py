"""What a body asks for, against vLLM's own request classes: the field that a path obeys, and its numbers."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.support.engine.engine_environment import PYTHON

pytestmark = pytest.mark.timeout(600)

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MODEL_TOKENS = 3000
"""What a model has left for an answer: an estimate without a limit counts the cap instead."""
FIELDS: list[dict[str, Any]] = [
    {},
    {"max_tokens": None},
    {"max_tokens": 7},
    {"max_tokens": "1_00.0"},
    {"max_tokens": 20.0},
    {"max_completion_tokens": 7},
    {"max_completion_tokens": 7, "max_tokens": 90},
    {"max_completion_tokens": 90, "max_tokens": 7},
    {"max_completion_tokens": 0, "max_tokens": 90},
    {"max_output_tokens": 7},
    {"max_output_tokens": "7", "max_tokens": 90},
    {"max_tokens": 5, "n": "64"},
    {"max_tokens": 5, "n": " 64 "},
    {"max_tokens": 5, "n": "0__64"},
    {"max_tokens": 5, "n": 64.0},
    {"max_tokens": 5, "n": None},
    {"max_tokens": 5, "n": 3, "best_of": 2},
]
PROGRAM = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from fleetkeeper_contract.bodies.asked import asked_of
from fleetkeeper_contract.bodies.reader import read_body

left = int(sys.argv[1])
KINDS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}

def runs(path, data):
    request = KINDS[path].model_validate_json(data)
    if path == "/v1/responses":
        own = request.max_output_tokens
    elif path == "/v1/completions":
        own = request.max_tokens
    else:
        own = request.max_completion_tokens
        own = request.max_tokens if own is None else own
    tokens = left if own is None else min(own, left)
    parameters = (request.to_sampling_params(tokens, {}) if tokens else None)
    return [getattr(parameters, "max_tokens", 0), getattr(parameters, "n", 1) or 1]

found = []
for path, fields in json.load(sys.stdin):
    data = json.dumps(fields).encode()
    try:
        vllm = runs(path, data)
    except (ValueError, TypeError) as error:
        vllm = str(error)[:200]
    asked = asked_of(read_body(data), path, len(data))
    found.append([path, fields, vllm, [left if asked.max_tokens is None else asked.max_tokens, asked.answers]])
print(json.dumps(found))
"""


def test_an_estimate_is_never_less_than_what_vllm_would_run() -> None:
    """It is the same, but where two fields could be meant."""
    prompts = {COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}
    messages = {"messages": [{"role": "user", "content": "x"}]}
    cases = [
        (path, {"model": "m", **prompts.get(path, messages), **fields})
        for path in (CHAT, COMPLETIONS, RESPONSES)
        for fields in FIELDS
    ]
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM, str(MODEL_TOKENS)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    run = [case for case in found if isinstance(case[2], list)]
    assert len(run) > len(cases) // 2, found
    for path, fields, (tokens, choices), (our_tokens, our_choices) in run:
        assert our_choices >= choices, (path, fields)
        assert our_tokens >= tokens, (path, fields)
        could_be_two = "max_completion_tokens" in fields and "max_tokens" in fields
        if not could_be_two and fields.get("max_tokens", 1) is not None:
            assert (our_tokens, our_choices) == (tokens, choices), (path, fields)
