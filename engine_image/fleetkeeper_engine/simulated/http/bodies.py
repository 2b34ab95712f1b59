"""The bodies of requests, and what vLLM checks in them."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fleetkeeper_engine.simulated.http.errors import (
    RefusedRequestError,
    invalid,
    invalid_fields,
)

_INT64 = 2**63
Token = Annotated[int, Field(ge=0, lt=_INT64)]
Prompt = list[int] | list[list[int]] | str | list[str]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None


class StreamOptions(BaseModel):
    """The usage that a stream reports."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingBody(_Body):
    """The fields that chats and completions share."""

    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] = 0
    cache_salt: str | None = None

    @property
    def choices(self) -> int:
        """Return the number of answers to each prompt."""
        return 1

    @property
    def asked_tokens(self) -> int | None:
        """Return the most tokens of an answer; None without a limit."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Return how many alternatives each token has in the answer's logprobs; None without logprobs."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def usage_in_stream(self) -> tuple[bool, bool]:
        """Return whether a stream ends with its usage, and whether each frame has it."""
        options = self.stream_options
        with_usage = bool(options and options.include_usage)
        return with_usage, bool(with_usage and options and options.continuous_usage_stats)


class CompletionBody(SamplingBody):
    """A request for completions."""

    prompt: Prompt | None = None
    max_tokens: int | None = 16
    n: int = 1
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None

    @property
    def choices(self) -> int:
        """Return the number of answers to each prompt."""
        return self.n

    @property
    def top(self) -> int | None:
        """Return how many alternatives each token has in the answer's logprobs."""
        return self.logprobs


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(SamplingBody):
    """A request for an answer in a conversation."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    n: int | None = 1
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None

    @property
    def choices(self) -> int:
        """Return the number of answers."""
        return 1 if self.n is None else self.n

    @property
    def asked_tokens(self) -> int | None:
        """Return the most tokens of an answer."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def top(self) -> int | None:
        """Return how many alternatives each token has in the answer's logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class EmbeddingBody(_Body):
    """A request for embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    priority: int = 0


class TokenizeBody(_Body):
    """A request for the tokens of a text or of a conversation."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(_Body):
    """A request for the text of tokens."""

    tokens: list[Token]


Body = TypeVar("Body", bound=_Body)


def parse_body(kind: type[Body], content: bytes, media_type: str) -> Body:
    """Return the body of a request.

    Raises:
        RefusedRequestError: if it is not JSON, or a field is wrong.
    """
    if media_type.partition(";")[0].strip().lower() != "application/json":
        raise invalid(["Unsupported Media Type: Only 'application/json' is allowed"], None)
    if not content:
        error: dict[str, object] = {"type": "missing", "loc": "body", "msg": "Field required"}
        raise invalid([str({**error, "input": "None"})], "body")
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as problem:
        place = f"body.{getattr(problem, 'pos', 0)}"
        reason = getattr(problem, "msg", str(problem))
        error = {"type": "json_invalid", "loc": place, "msg": "JSON decode error"}
        full = {**error, "input": "<dict of 0 items>", "ctx": {"error": reason}}
        raise invalid([str(full)], place) from None
    if not isinstance(fields, dict):
        raise invalid(
            [
                "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be an object'}"
            ],
            "body",
        )
    try:
        return kind.model_validate(fields)
    except ValidationError as problem:
        raise invalid_fields(problem) from None


def check_sampling(body: SamplingBody, max_logprobs: int) -> None:
    """Check the values of a request.

    Raises:
        RefusedRequestError: naming the first field whose value vLLM refuses.
    """
    if body.stream_options is not None and not body.stream:
        raise RefusedRequestError(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    _check_numbers(body)
    if body.min_tokens < 0:
        raise RefusedRequestError(f"min_tokens must be at least 0, got {body.min_tokens}.")
    if any(not stop for stop in body.stops):
        raise RefusedRequestError("stop cannot contain an empty string.")
    top = body.top
    if top is not None and not -1 <= top <= max_logprobs:
        raise RefusedRequestError(
            f"Requested sample logprobs of {top}, which is not within 0 to {max_logprobs}",
            param="logprobs",
            value=top,
        )


def _check_numbers(body: SamplingBody) -> None:
    if body.choices < 1:
        raise RefusedRequestError(f"n must be at least 1, got {body.choices}.")
    ranges = (
        ("temperature", body.temperature, 0.0, 2.0),
        ("top_p", body.top_p, math.ulp(0.0), 1.0),
        ("min_p", body.min_p, 0.0, 1.0),
        ("presence_penalty", body.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", body.frequency_penalty, -2.0, 2.0),
    )
    for name, value, least, most in ranges:
        if value is not None and not least <= value <= most:
            named = name in ("temperature", "top_p")
            raise RefusedRequestError(
                f"{name} must be in [{math.floor(least)}, {math.floor(most)}], got {value}.",
                param=name if named else None,
                value=value if named else None,
            )
    if body.top_k is not None and body.top_k < -1:
        raise RefusedRequestError(f"top_k must be 0 (disable), or at least 1, got {body.top_k}.")
