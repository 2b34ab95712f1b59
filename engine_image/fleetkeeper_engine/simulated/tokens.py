"""The tokenizer and the texts of a simulated engine: no vocabulary, and the same text for the same seed.

A token is up to six bytes of UTF-8, at most one word with the space before it. Its ID holds the bytes,
so any text is decoded to itself. English takes about four characters per token, as with real models.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence

BOS = 1
EOS = 2
_SPECIAL = {BOS: "<s>", EOS: "</s>"}
MAX_CHARACTERS = _BYTES = 6
"""The longest token."""
_SHIFT = 8 * _BYTES
_MASK = (1 << _SHIFT) - 1
PLAIN_IDS = 1 << 18
"""IDs below this stand for tokens that only their sender knows, as from a dump of real prompts."""
_PIECE = re.compile(r" ?[A-Za-z0-9]{1,5}|\s|.", re.DOTALL)
_WORDS = (
    "a about after again all also and are as at be can do each end few first for from go good "
    "has have if in into is it like line long made make many more most much new no not now of on "
    "one open or out over part read same see set so some step take than that the them then there "
    "these they thing this time to two under up use was water way we well what when where which "
    "while will with word work world year you"
)


def encode(text: str) -> list[int]:
    """Return the IDs of a text's tokens."""
    found = []
    for piece in _PIECE.findall(text):
        data = piece.encode("utf-8", "surrogatepass")
        found.append(len(data) << _SHIFT | int.from_bytes(data, "big"))
    return found


def decode(tokens: Iterable[int]) -> str:
    """Return the text of tokens, without special ones."""
    return "".join(token_text(token) for token in tokens if token not in _SPECIAL)


def is_token(token: int) -> bool:
    """Return whether an ID is in the vocabulary. All IDs are below 2^53, so that JSON keeps them."""
    return 0 <= token < PLAIN_IDS or 1 <= token >> _SHIFT <= _BYTES


def token_text(token: int) -> str:
    """Return the text of one token. An ID that `encode` does not give is shown as a word of its own."""
    size = token >> _SHIFT
    if special := _SPECIAL.get(token):
        return special
    if not 1 <= size <= _BYTES:
        return f" t{token}"
    data = (token & _MASK).to_bytes(_BYTES, "big")[-size:]
    return data.decode("utf-8", "replace")


TOKENS = tuple(encode(f" {word}")[0] for word in _WORDS.split() if len(word) <= _BYTES - 1)
"""The tokens of answers. Each is a word, so an answer has as many tokens as `encode` finds in it."""
TEXTS = tuple(token_text(token) for token in TOKENS)


class Text:
    """The endless text that answers one prompt with one seed: a generator of indices into `TOKENS`."""

    def __init__(self, seed: int, prompt: Sequence[int], choice: int = 0) -> None:
        # Only the ends of a long prompt count: it may have a hundred thousand tokens.
        known = f"{seed} {choice} {len(prompt)} {prompt[:64]} {prompt[-64:]}"
        data = known.encode()
        self._state = zlib.crc32(data) << 32 | zlib.crc32(data, 1)
        self.natural_length = 16 + self._next() % 497
        """Tokens after which a model would end the answer by itself."""

    def take(self, count: int) -> list[int]:
        """Return the indices of the next tokens."""
        return [self._next() % len(TOKENS) for _ in range(count)]

    def _next(self) -> int:
        # Knuth's MMIX generator; its upper bits are the good ones.
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        return self._state >> 33
