"""The work that a body requests of an engine, as vLLM reads it: its sequences and their tokens.

The gateway's limits, the backlog of batches and the engine's admission use these numbers.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from fleetkeeper_contract.bodies.media import MEDIA_TOKENS, media_of
from fleetkeeper_contract.bodies.outline import Many
from fleetkeeper_contract.bodies.reader import JsonBody, token_numbers

BYTES_PER_TOKEN: Final = 4
"""Bytes of text for each token, as a rule of thumb."""
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
CHOICES: Final = frozenset({COMPLETIONS, CHAT})
"""Paths where `n` has a meaning."""
MAX_COUNTED: Final = 10**6
"""Larger numbers of a client count as this one."""

_MAX_TOKENS: Final = {
    COMPLETIONS: ("max_tokens",),
    CHAT: ("max_completion_tokens", "max_tokens"),
    RESPONSES: ("max_output_tokens",),
}
"""The fields that vLLM reads on a path, and no others. With two, versions differ in which one counts."""
_COMPLETION_TOKENS: Final = 16
"""vLLM's default on `/v1/completions`. On other paths it is what is left of the model's length."""
_SCORED = ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items")
INPUTS: Final = {
    COMPLETIONS: ("prompt",),
    CHAT: (),
    RESPONSES: (),
    "/score": _SCORED,
    "/v1/score": _SCORED,
    "/rerank": ("documents",),
    "/v1/rerank": ("documents",),
    "/v2/rerank": ("documents",),
}
"""The fields whose items are inputs of their own, by path. On other paths they are those of pooling."""
_POOLED = ("input", "messages")
_MAX_SEQUENCES: Final = 10**9
_MAX_DIGITS: Final = 64
"""Characters of a number that is written as a text."""
_WHOLE = re.compile(r"([+-]?[0-9][0-9_]*)(?:\.0+)?")
"""Texts that pydantic may read as a whole number, and a few more."""


class Asked(NamedTuple):
    """The work that a body requests."""

    prompt_bytes: int
    """Bytes of text. What is no text counts as the bytes that text of as many tokens has."""
    max_tokens: int | None
    """Tokens of one answer that the client allows. None: the engine decides."""
    answers: int
    """Prompts times choices."""


def asked_of(body: JsonBody, path: str, size: int) -> Asked:
    """Return what a body asks for.

    Args:
        body: the body.
        path: decides which of its fields have a meaning.
        size: its bytes.
    """
    media = media_of(body)
    text = max(size - media.encoded_bytes, BYTES_PER_TOKEN * token_numbers(body.fields))
    prompt = text + BYTES_PER_TOKEN * MEDIA_TOKENS * media.items
    if path not in _MAX_TOKENS:
        return Asked(prompt, 0, 1)
    answers = min(sequences_of(body, path), MAX_COUNTED)
    return Asked(prompt, _answer_tokens(body, path), answers)


def sequences_of(body: JsonBody, path: str) -> int:
    """Return the sequences of a request: its inputs, times the choices for each.

    A prompt may be a text, a list of texts, a list of token numbers (one prompt) or a list of such
    lists. `best_of` above `n` (older vLLM), and beam search (whose width is `n`), run that many at
    once.
    """
    fields = body.fields
    inputs = choices = 1
    for name in INPUTS.get(path, _POOLED):
        if name in fields:
            inputs = max(inputs, _inputs(name, fields[name]))
    if path not in CHOICES:
        return inputs
    embedded = fields.get("prompt_embeds")
    if embedded is not None and path == COMPLETIONS:
        # Prompts given as embeddings run in addition to those given as texts.
        texts = inputs if fields.get("prompt") not in (None, "", []) else 0
        inputs = max(1, texts + (len(embedded) if isinstance(embedded, list) else 1))
    for name in ("n", "best_of"):
        if name in fields:
            choices = max(choices, whole(body, fields[name]) or 1)
    return min(inputs * choices, _MAX_SEQUENCES)


def whole(body: JsonBody, value: object) -> int | None:
    """Return a whole number as vLLM reads it: "3" and 3.0 are 3. None: it is none, or vLLM refuses it."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, int):
        return int(value)
    found = _WHOLE.fullmatch((body.text(value, _MAX_DIGITS) or "").strip())
    return int(found[1].replace("_", "")) if found else None


def is_long_number(body: JsonBody, value: object) -> bool:
    """Return whether a text is too long for a number. vLLM reads any number of spaces and zeros."""
    return body.length(value) > 0 and body.text(value, _MAX_DIGITS) is None


def _answer_tokens(body: JsonBody, path: str) -> int | None:
    fields = body.fields
    if path == COMPLETIONS and "max_tokens" not in fields:
        return _COMPLETION_TOKENS
    named = [fields[name] for name in _MAX_TOKENS[path] if fields.get(name) is not None]
    if not named:
        return None
    read = [whole(body, value) for value in named]
    return max(
        MAX_COUNTED if tokens is None else min(max(tokens, 0), MAX_COUNTED) for tokens in read
    )


def _inputs(name: str, value: object) -> int:
    if not isinstance(value, list) or not value or isinstance(value[0], int | float):
        return 1
    # The items of one conversation are a single sequence; each document is one.
    if name in _POOLED and isinstance(value[0], dict):
        return 1
    return len(value) + sum(item.numbers - 1 for item in value if type(item) is Many)
