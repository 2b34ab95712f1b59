"""Requests of random shapes: types, sizes, depths, encodings, and where their client hangs up."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

PATHS = (
    "/v1/completions",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/score",
    "/rerank",
    "/v1/nowhere",
)
TIERS = (None, None, "realtime", "standard", "batch", "BATCH", "vip", "\xff")
_NAMES = ("n", "best_of", "prompt", "input", "messages", "tools", "stop", "priority", "background",
          "stream", "logprobs", "temperature", "seed", "x", "", "model", "tokens", "documents")  # fmt: skip
_NUMBERS = (0, 1, 2, -1, 3, 1000, 10**6, 2**63, 2**64, 10**400, 0.5, 1.0, 1000.0, 1e308, -0.0)
_TEXTS = ("", "1", "1000", "many", "\ud800", "\0", "é" * 50, '"\\' * 20, "x" * 500, "  7  ")
_MAX_BYTES = 300_000


@dataclass(frozen=True)
class HostileRequest:
    """One request, and how much of it is sent."""

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    sent: int
    """Bytes of the body; fewer than it has: then the client hangs up."""
    leaves: bool
    """Hangs up before the answer."""
    parts: int

    @property
    def is_whole(self) -> bool:
        """Whether an answer is to come."""
        return self.sent == len(self.body) and not self.leaves


def hostile_request(dice: random.Random, model: str = "tiny") -> HostileRequest:
    """The next one."""
    path = dice.choice(PATHS)
    body = dice.choice(_BODIES)(dice, model)[:_MAX_BYTES]
    tier = dice.choice(TIERS)
    headers = [(b"content-type", b"application/json")]
    if tier is not None:
        headers.append((b"x-inference-tier", tier.encode("latin-1")))
    sent = dice.randrange(len(body) + 1) if dice.random() < 0.1 else len(body)
    return HostileRequest(path, headers, body, sent, dice.random() < 0.1, dice.randint(1, 5))


def _value(dice: random.Random, depth: int) -> Any:
    kind = dice.randrange(6 if depth else 4)
    if kind == 0:
        return dice.choice(_NUMBERS)
    if kind == 1:
        return dice.choice(_TEXTS)
    if kind <= 3:
        return dice.choice((None, True, False, dice.randint(-5, 50)))
    if kind == 4:
        return [_value(dice, depth - 1) for _ in range(dice.randrange(4))]
    return {dice.choice(_NAMES): _value(dice, depth - 1) for _ in range(dice.randrange(4))}


def _good(dice: random.Random, model: str) -> dict[str, Any]:
    """What a client would send, for any of the routes."""
    return {
        "model": model,
        "prompt": "one two three",
        "input": "one two three",
        "messages": [{"role": "user", "content": "one two"}],
        "max_tokens": dice.randint(1, 4),
    }


def _plain(dice: random.Random, model: str) -> bytes:
    return json.dumps(_good(dice, model)).encode()


def _changed(dice: random.Random, model: str) -> bytes:
    fields = _good(dice, model)
    for _ in range(dice.randint(1, 3)):
        fields[dice.choice(_NAMES)] = _value(dice, 3)
    text = json.dumps(fields, ensure_ascii=dice.random() < 0.5)
    encoding = dice.choice(("utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32-le"))
    return text.encode(encoding, "surrogatepass")


def _many(dice: random.Random, model: str) -> bytes:
    item = dice.choice((b"0", b"[]", b"{}", b'""', b"0.5", b"null", b"[1,2]", b'{"role":"user"}'))
    name = dice.choice(("prompt", "messages", "input", "stop", "x", "tokens"))
    count = dice.choice((3, 60, 3000, 60_000))
    head = json.dumps({**_good(dice, model), name: 0}).encode()
    at = head.index(json.dumps(name).encode() + b": 0") + len(name) + 4
    return head[:at] + b"[" + b",".join([item] * count) + b"]" + head[at + 1 :]


def _deep(dice: random.Random, model: str) -> bytes:
    levels = dice.choice((3, 60, 66, 500, 5000, 100_000))
    opening, closing = dice.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return b'{"prompt":"x","x":' + opening * levels + b"0" + closing * levels + b"}"


def _noise(dice: random.Random, model: str) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 100, 100_000)))


def _broken(dice: random.Random, model: str) -> bytes:
    body = bytearray(_changed(dice, model))
    for _ in range(dice.randint(1, 5)):
        body[dice.randrange(len(body))] = dice.randrange(256)
    return bytes(body)


def _long(dice: random.Random, model: str) -> bytes:
    return json.dumps(
        {**_good(dice, model), "prompt": "word " * dice.choice((300, 20_000))}
    ).encode()


_BODIES = (_plain, _plain, _changed, _changed, _changed, _many, _deep, _noise, _broken, _long)
