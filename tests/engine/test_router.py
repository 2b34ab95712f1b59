"""Bodies that a router of its own types refused or changed: vLLM behind ours answers as without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import requests

from tests.support.engine.engine_contract import CHAT, COMPLETIONS
from tests.support.engine.router_world import Routed
from tests.support.engine.supervised_engine import RunningEngine
from tests.support.guards import GUARD_S

MESSAGES = [{"role": "user", "content": "Say one word."}]
FUNCTION = {"name": "now", "description": "The time"}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a tool without parameters": (CHAT, {"tools": [{"type": "function", "function": FUNCTION}]}),
    "a strict tool": (
        CHAT,
        {
            "tools": [
                {"type": "function", "function": {**FUNCTION, "parameters": {}, "strict": True}}
            ]
        },
    ),
    "stream is null": (CHAT, {"stream": None}),
    "logprobs is null": (CHAT, {"logprobs": None, "stop": None, "user": None}),
    "a field of vLLM's": (CHAT, {"min_tokens": 3, "top_k": 5, "ignore_eos": True}),
    "an unknown field": (CHAT, {"new_field": {"nested": [None]}}),
    "two fields of tokens": (COMPLETIONS, {"max_completion_tokens": 1}),
    "usage in each chunk": (
        CHAT,
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "prompt tokens": ("/tokenize", {"add_generation_prompt": False}),
    "a wrong type": (CHAT, {"temperature": "hot"}),
    "a model that is unknown": (CHAT, {"model": "ch at"}),
}


@pytest.fixture(scope="module")
def routed(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    """The engine behind a router."""
    with closing(Routed(engine, tmp_path_factory.mktemp("router"))) as found:
        yield found


@pytest.mark.parametrize("what", BODIES)
def test_an_answer_is_the_same_through_the_router(
    engine: RunningEngine, routed: Routed, what: str
) -> None:
    path, fields = BODIES[what]
    asked = {"prompt": "One"} if path == COMPLETIONS else {"messages": MESSAGES}
    limits = {} if path == "/tokenize" else {"max_tokens": 4, "seed": 1, "temperature": 0.0}
    body = json.dumps({"model": "tiny", **asked, **limits, **fields}).encode()
    direct, through = (sent(url + path, body) for url in (engine.url, routed.url))
    assert through == direct


def sent(url: str, body: bytes) -> tuple[int, str | None, list[Any]]:
    """Return the status, the type and the frames of an answer, without what differs each time.

    How many tokens are in a frame differs too: it depends on when vLLM's processes run. So successive frames with
    text are one.
    """
    headers = {"Content-Type": "application/json"}
    response = requests.post(url, data=body, headers=headers, timeout=GUARD_S)
    frames = [
        json.loads(part.removeprefix("data: "))
        for part in response.text.split("\n\n")
        if part and part != "data: [DONE]"
    ]
    for frame in frames:
        for name in ("id", "created"):
            frame.pop(name, None)
    return response.status_code, response.headers.get("Content-Type"), merged(frames)


def merged(frames: list[Any]) -> list[Any]:
    """Return the frames, each with the text of those that follow it and differ in text and usage alone."""
    found: list[Any] = []
    for frame in frames:
        text = text_of(frame)
        before = text_of(found[-1]) if found else None
        if text is None or before is None:
            found.append(frame)
            continue
        frame["choices"][0]["delta"]["content"] = before + text
        found[-1] = frame
    return found


def text_of(frame: Any) -> str | None:
    """Return the text of a chat's frame that has nothing else; None for any other."""
    choices = frame.get("choices") if isinstance(frame, dict) else None
    if not choices or choices[0].get("delta", {}).keys() != {"content"}:
        return None
    return str(choices[0]["delta"]["content"])
