"""The answers of vLLM's API: whole ones, and the frames of streams."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetkeeper_engine.simulated.processor import Answer
from fleetkeeper_engine.simulated.simulation_settings import VERSION_TEXT
from fleetkeeper_engine.simulated.tokens import TEXTS

DONE = b"data: [DONE]\n\n"
_LOGPROB = -0.5
"""The logarithm of the probability of each generated token. Alternatives have a lower one."""


def to_json(value: object) -> str:
    """Return JSON as vLLM writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True)
class Choice:
    """One answer so far."""

    prompt_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    cached_tokens: int = 0

    def add(self, answer: Answer) -> None:
        """Add what the sequence has generated."""
        self.text += answer.text
        self.tokens += answer.tokens
        self.finish_reason, self.stop_reason = answer.finish_reason, answer.stop_reason
        self.cached_tokens = answer.cached_tokens


@dataclass(frozen=True, slots=True)
class Format:
    """The format of a request's answer."""

    request_id: str
    model: str
    created: int
    chat: bool
    choices: int
    """Choices of each prompt."""
    top: int | None
    """Alternatives of each token, if logprobs were requested."""
    details: bool
    """True if usage states the cached tokens."""
    echoes: Sequence[str] = ()
    """Text before each answer, by prompt."""

    def whole(self, found: Sequence[Choice]) -> dict[str, Any]:
        """Return a whole answer."""
        choices = [self._choice(index, choice) for index, choice in enumerate(found)]
        answer: dict[str, Any] = {
            "id": self.request_id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": VERSION_TEXT,
            "usage": self.usage(found, streamed=False),
        }
        if self.chat:
            answer |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return answer | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        ending = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        logprobs = self._logprobs(choice.tokens, 0)
        if self.chat:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            message |= {"annotations": None, "audio": None, "function_call": None}
            known = {"index": index, "message": {**message, "reasoning": None}}
            return {**known, "logprobs": logprobs, **ending, "token_ids": None} | {
                "routed_experts": None
            }
        text = self._echo(index) + choice.text
        known = {"index": index, "text": text, "logprobs": logprobs, **ending, "token_ids": None}
        return known | {"prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}

    def usage(self, found: Sequence[Choice], *, streamed: bool) -> dict[str, Any]:
        """Return the usage of all answers. Each prompt counts once."""
        prompt = sum(choice.prompt_tokens for choice in found[:: self.choices])
        completion = sum(len(choice.tokens) for choice in found)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }
        if not self.details:
            unknown = {"prompt_tokens_details": None, "completion_tokens_details": None}
            return usage if streamed else usage | unknown
        # vLLM says for a chat how many tokens were added to the cache elsewhere; here none are.
        details: dict[str, Any] = {"cached_tokens": found[-1].cached_tokens}
        if self.chat:
            details["created_cache_tokens"] = 0
        if streamed:
            return usage | {"prompt_tokens_details": details}
        details = {"created_cache_tokens": None, "multimodal_tokens": None, **details}
        return usage | {"prompt_tokens_details": details, "completion_tokens_details": None}

    def first(self, index: int, usage: Mapping[str, Any] | None) -> bytes:
        """Return the frame that begins an answer of a chat."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        more = {"prompt_token_ids": None, "prompt_text": None}
        return self._frame(to_json([choice]), more if usage is None else {**more, "usage": usage})

    def delta(
        self,
        index: int,
        answer: Answer,
        before: int,
        usage: Mapping[str, Any] | None,
        *,
        ends: bool,
    ) -> bytes:
        """Return the frame of what a sequence has generated.

        Args:
            index: the place of the answer.
            answer: what is new.
            before: tokens of the frames before this one.
            usage: of this sequence so far, if each frame says it.
            ends: whether this is the request's last frame, which says who answered.
        """
        text = to_json((self._echo(index) if not before else "") + answer.text)
        content = f'"delta":{{"content":{text}}}' if self.chat else f'"text":{text}'
        logprobs = to_json(self._logprobs(answer.tokens, before))
        choice = f'{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":{to_json(answer.finish_reason)}'
        if not self.chat or answer.finish_reason is not None:
            choice += f',"stop_reason":{to_json(answer.stop_reason)}'
        choice += (
            ',"token_ids":null}' if self.chat else ',"prompt_token_ids":null,"token_ids":null}'
        )
        more: dict[str, Any] = {} if usage is None else {"usage": usage}
        return self._frame(
            f"[{choice}]", {**more, "system_fingerprint": VERSION_TEXT} if ends else more
        )

    def last(self, found: Sequence[Choice]) -> bytes:
        """Return the frame with the usage of a stream."""
        usage = self.usage(found, streamed=True)
        return self._frame("[]", {"usage": usage, "system_fingerprint": VERSION_TEXT})

    def _frame(self, choices: str, more: Mapping[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        extra = f",{to_json(more)[1:-1]}" if more else ""
        return (
            f'data: {{"id":{to_json(self.request_id)},"object":"{kind}","created":{self.created},'
            f'"model":{to_json(self.model)},"choices":{choices}{extra}}}\n\n'
        ).encode("utf-8", "replace")

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.choices] if self.echoes else ""

    def _logprobs(self, tokens: Sequence[int], before: int) -> dict[str, Any] | None:
        if self.top is None:
            return None
        texts = [TEXTS[index] for index in tokens]
        others = [TEXTS[(index + 1) % len(TEXTS)] for index in tokens]
        if self.chat:
            return {
                "content": [_entry(*pair, self.top) for pair in zip(texts, others, strict=True)]
            }
        offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
        tops = [
            {text: _LOGPROB, **({other: 2 * _LOGPROB} if self.top else {})}
            for text, other in zip(texts, others, strict=True)
        ]
        return {
            "text_offset": [before + offset for offset in offsets],
            "token_logprobs": [_LOGPROB] * len(texts),
            "tokens": texts,
            "top_logprobs": tops,
        }


def _entry(text: str, other: str, top: int) -> dict[str, Any]:
    known = _token(text, _LOGPROB)
    alternatives = [known, _token(other, 2 * _LOGPROB)][:top]
    return {**known, "top_logprobs": alternatives}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
