"""Chats, completions and embeddings: from a body to sequences of the engine, and their answers."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fleetkeeper_engine.simulated.engine import Engine
from fleetkeeper_engine.simulated.http.answers import DONE, Choice, Format, to_json
from fleetkeeper_engine.simulated.http.bodies import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    Prompt,
    SamplingBody,
    check_sampling,
)
from fleetkeeper_engine.simulated.http.chat_template import rendered
from fleetkeeper_engine.simulated.http.errors import RefusedRequestError, error_body
from fleetkeeper_engine.simulated.http.exchange import ClientGoneError, Exchange
from fleetkeeper_engine.simulated.processor import (
    Collector,
    EngineCoreRequest,
    EngineDeadError,
    Sampling,
)
from fleetkeeper_engine.simulated.tokens import (
    BOS,
    MAX_CHARACTERS,
    Text,
    decode,
    encode,
    is_token,
)

EMBEDDING_SIZE = 256
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


@dataclass(frozen=True, slots=True)
class Job:
    """The sequences of one request, and the form of their answer."""

    requests: list[EngineCoreRequest]
    form: Format


async def generate(engine: Engine, body: ChatBody | CompletionBody, exchange: Exchange) -> None:
    """Answer a chat or a completion.

    Raises:
        RefusedRequestError: if vLLM refuses it.
    """
    job = _job(engine, body, exchange)
    collector = _submitted(engine, job.requests)
    watching = asyncio.create_task(_watch(exchange, collector))
    try:
        if body.stream:
            await _stream(engine, body, job, collector, exchange)
        else:
            found = await _whole(job, collector)
            await exchange.answer(HTTPStatus.OK, to_json(job.form.whole(found)))
    except ClientGoneError:
        return
    finally:
        watching.cancel()
        engine.abort(request.request_id for request in job.requests)


async def embed(engine: Engine, body: EmbeddingBody, exchange: Exchange) -> None:
    """Answer a request for embeddings: each is a unit vector that depends on its text and the seed.

    Raises:
        RefusedRequestError: if vLLM refuses it.
    """
    exchange.check_model(body.model)
    prompts = _prompts(engine, body.input)
    requests = []
    for index, prompt in enumerate(prompts):
        _check_length(engine, prompt, least_answer=0)
        requests.append(
            EngineCoreRequest(
                f"{exchange.request_id('embd')}-{index}",
                prompt,
                Sampling(max_tokens=0),
                Text(engine.settings.seed, prompt),
                time.monotonic(),
                _priority(engine, body.priority),
                exchange.adapter(body.model),
            )
        )
    collector = _submitted(engine, requests)
    watching = asyncio.create_task(_watch(exchange, collector))
    try:
        left = len(requests)
        while left:
            left -= len(await collector.take())
    except ClientGoneError:
        return
    finally:
        watching.cancel()
        engine.abort(request.request_id for request in requests)
    size = body.dimensions or EMBEDDING_SIZE
    vectors = [_vector(request.text, size) for request in requests]
    tokens = sum(map(len, prompts))
    data = [
        {"index": index, "object": "embedding", "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    answer = {
        "id": exchange.request_id("embd"),
        "object": "list",
        "created": int(time.time()),
        "model": body.model or engine.options.served_model_names[0],
        "data": data,
        "usage": {**usage, "prompt_tokens_details": None, "completion_tokens_details": None},
    }
    await exchange.answer(HTTPStatus.OK, to_json(answer))


def _job(engine: Engine, body: ChatBody | CompletionBody, exchange: Exchange) -> Job:
    options = engine.options
    chat = isinstance(body, ChatBody)
    exchange.check_model(body.model)
    prompts = (
        [_conversation(engine, body)]
        if isinstance(body, ChatBody)
        else _prompts(engine, body.prompt)
    )
    check_sampling(body, options.max_logprobs)
    request_id = exchange.request_id("chatcmpl" if chat else "cmpl")
    requests = []
    for place, prompt in enumerate(prompts):
        sampling = _sampling(engine, body, prompt)
        requests += [
            EngineCoreRequest(
                f"{request_id}-{place}-{choice}",
                prompt,
                sampling,
                Text(_seed(engine, body), prompt, 0 if body.temperature == 0 else choice),
                time.monotonic(),
                _priority(engine, body.priority),
                exchange.adapter(body.model),
            )
            for choice in range(body.choices)
        ]
    echoes = [decode(prompt) for prompt in prompts] if getattr(body, "echo", False) else []
    form = Format(
        request_id,
        body.model or options.served_model_names[0],
        int(time.time()),
        chat,
        body.choices,
        body.top,
        options.prompt_tokens_details,
        echoes,
    )
    return Job(requests, form)


def _conversation(engine: Engine, body: ChatBody) -> list[int]:
    if not body.messages:
        raise RefusedRequestError(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    wants_tools = body.tools and body.tool_choice in (None, "auto")
    if wants_tools and not engine.options.auto_tool_choice:
        raise RefusedRequestError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    if body.top_logprobs and not body.logprobs:
        raise RefusedRequestError(
            "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs"
        )
    return rendered(body.messages, engine.options.served_model_names[0])


def _prompts(engine: Engine, prompt: Prompt | None) -> list[list[int]]:
    """Return the tokens of each prompt: a text, texts, tokens, or lists of tokens."""
    if prompt is None or prompt == "":
        raise RefusedRequestError(
            "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt"
        )
    if isinstance(prompt, str):
        return [_tokens(engine, prompt)]
    if not prompt:
        raise RefusedRequestError("You must pass at least one prompt")
    numbers = [item for item in prompt if isinstance(item, int)]
    if numbers:
        return [_tokens(engine, numbers)]
    return [_tokens(engine, item) for item in prompt if not isinstance(item, int)]


def _tokens(engine: Engine, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        most = engine.options.max_model_len * MAX_CHARACTERS
        if len(prompt) > most:
            raise RefusedRequestError(
                f"This model's maximum context length is {engine.options.max_model_len} tokens. However, "
                f"your prompt contains {len(prompt)} characters (more than {most}). Please reduce the "
                "length of the input prompt.",
                param="input_text",
                value=len(prompt),
            )
        return [BOS, *encode(prompt)]
    wrong = next((token for token in prompt if not is_token(token)), None)
    if wrong is not None:
        raise RefusedRequestError(f"Token id {wrong} is out of vocabulary")
    if not prompt:
        raise RefusedRequestError("The decoder prompt cannot be empty")
    return prompt


def _check_length(engine: Engine, prompt: Sequence[int], *, least_answer: int) -> int:
    """Return the tokens that are left for an answer."""
    longest = engine.options.max_model_len
    if len(prompt) > longest:
        raise RefusedRequestError(
            f"This model's maximum context length is {longest} tokens. However, your prompt contains "
            f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            param="input_tokens",
            value=len(prompt),
        )
    return max(longest - len(prompt), least_answer)


def _sampling(engine: Engine, body: SamplingBody, prompt: Sequence[int]) -> Sampling:
    left = _check_length(engine, prompt, least_answer=0)
    asked = body.asked_tokens
    tokens = left if asked is None else min(left, asked)
    if tokens < 1:
        raise RefusedRequestError(
            f"max_tokens must be at least 1, got {tokens}.", param="max_tokens", value=tokens
        )
    if body.min_tokens > tokens:
        raise RefusedRequestError(
            f"min_tokens must be less than or equal to max_tokens={tokens}, got {body.min_tokens}."
        )
    return Sampling(
        max_tokens=tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop=body.stops,
        keeps_stop=body.include_stop_str_in_output,
        interval=max(engine.options.stream_interval, body.stream_interval or 1),
        streams=bool(body.stream),
    )


def _seed(engine: Engine, body: SamplingBody) -> int:
    # A greedy answer does not depend on the request's seed.
    return engine.settings.seed if body.seed is None or body.temperature == 0 else body.seed


def _priority(engine: Engine, priority: int) -> int:
    return priority if engine.options.by_priority else 0


def _submitted(engine: Engine, requests: Sequence[EngineCoreRequest]) -> Collector:
    try:
        return engine.submit(requests)
    except ValueError as problem:
        raise RefusedRequestError(str(problem)) from None


async def _watch(exchange: Exchange, collector: Collector) -> None:
    await exchange.hung_up()
    collector.fail(ClientGoneError())


async def _whole(job: Job, collector: Collector) -> list[Choice]:
    found = [Choice(len(request.prompt_token_ids)) for request in job.requests]
    left = len(found)
    while left:
        for index, answer in (await collector.take()).items():
            found[index].add(answer)
            left -= answer.finish_reason is not None
    return found


async def _stream(
    engine: Engine, body: SamplingBody, job: Job, collector: Collector, exchange: Exchange
) -> None:
    form = job.form
    found = [Choice(len(request.prompt_token_ids)) for request in job.requests]
    with_usage, in_each = body.usage_in_stream
    if engine.options.force_include_usage:
        with_usage = in_each = True
    left, begun = len(found), False
    await exchange.begin(HTTPStatus.OK, _STREAM)
    while left:
        try:
            ready = await collector.take()
        except EngineDeadError:
            error = error_body(DEAD, "InternalServerError", HTTPStatus.INTERNAL_SERVER_ERROR)
            await exchange.send(b"data: " + error + b"\n\n" + DONE, more=False)
            return
        frames = []
        if form.chat and not begun:
            frames = [
                form.first(index, _usage(choice, in_each)) for index, choice in enumerate(found)
            ]
            begun = True
        for index, answer in sorted(ready.items()):
            choice = found[index]
            before = len(choice.tokens)
            choice.add(answer)
            ended = answer.finish_reason is not None
            left -= ended
            usage = _usage(choice, in_each)
            frames.append(form.delta(index, answer, before, usage, ends=ended and not with_usage))
        await exchange.send(b"".join(frames))
    await exchange.send((form.last(found) if with_usage else b"") + DONE, more=False)


def _usage(choice: Choice, wanted: bool) -> Mapping[str, Any] | None:
    if not wanted:
        return None
    prompt, completion = choice.prompt_tokens, len(choice.tokens)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def _vector(text: Text, size: int) -> list[float]:
    values = [index - 44.5 for index in text.take(size)]
    length = sum(value * value for value in values) ** 0.5
    return [value / length for value in values]


def _encoded(vector: list[float], encoding: str) -> object:
    if encoding == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
