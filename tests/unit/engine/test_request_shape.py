"""What a request body asks for, and which route a path is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.bodies.reader import read_body
from fleetkeeper_engine.in_vllm.http.request_shape import (
    Route,
    Shape,
    route_of,
    shape_of,
    with_priority,
)

COMPLETIONS = "/v1/completions"


PATHS = {"input": "/v1/embeddings", "documents": "/rerank"}


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({}, 1),
        ({"prompt": "a", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": "a", "n": 2, "best_of": 5}, 5),
        ({"input": ["a", "b", "c"]}, 3),
        ({"input": [{"role": "user"}, {"role": "user"}]}, 1),
        ({"query": "q", "documents": ["a", "b"]}, 2),
        ({"n": None, "prompt": []}, 1),
        ({"n": "many", "prompt": 5}, 1),
    ],
)
def test_slots_are_counted_in_sequences(fields: dict[str, Any], sequences: int) -> None:
    """Choices times prompts; nonsense counts as one, and vLLM refuses it."""
    path = next((path for name, path in PATHS.items() if name in fields), COMPLETIONS)
    assert shape_of(read_body(json.dumps(fields).encode()), path) == Shape(
        sequences, has_priority=False
    )


@given(
    st.dictionaries(
        st.text(max_size=5) | st.just("priority"), st.integers() | st.text(max_size=5), max_size=4
    ),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([b"", b" ", b"\n\n"]),
)
def test_a_body_keeps_all_but_its_priority(
    fields: dict[str, Any], priority: int, space: bytes
) -> None:
    """However it is written, only `priority` differs."""
    body = space + json.dumps(fields).encode() + space
    shape = shape_of(read_body(body), COMPLETIONS)
    assert json.loads(with_priority(body, shape, priority)) == {**fields, "priority": priority}


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/v1/chat/completions", Route.GENERATION),
        ("GET", "/v1/chat/completions", Route.PLAIN),
        ("POST", "/v1/embeddings", Route.GENERATION),
        ("POST", "/tokenize", Route.TOKENIZER),
        ("GET", "/health", Route.OPEN),
        ("GET", "/v1/responses/abc", Route.PLAIN),
        ("POST", "/sleep", Route.UNKNOWN),
        ("POST", "/v1/unload_lora_adapter", Route.UNKNOWN),
        ("POST", "/v1/completions/", Route.UNKNOWN),
        ("POST", "//v1/completions", Route.UNKNOWN),
    ],
)
def test_routes(method: str, path: str, route: Route) -> None:
    """What is work for the engine, what is not, and what is not known."""
    assert route_of(method, path) is route
