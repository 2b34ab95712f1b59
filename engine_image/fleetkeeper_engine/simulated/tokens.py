"""The tokenizer and the texts of a simulated engine: no vocabulary, and the same text for the same seed.

A token is at most one word with the space before it: up to six small letters, up to four letters and
digits, or one other character. Its ID holds the text, so any text is decoded to itself. IDs are below
2^31, because vllm-router reads them as 32 bits. English takes about four characters per token, as with
real models.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

BOS = 1
EOS = 2
_SPECIAL = {BOS: "<s>", EOS: "</s>"}
MAX_CHARACTERS = 6
"""The longest token."""
PLAIN_IDS = 1 << 18
"""IDs below this stand for tokens that only their sender knows, as from a dump of real prompts."""
_PIECE = re.compile(r" ?[a-z]{1,5}| ?[A-Za-z0-9]{1,3}|.", re.DOTALL)
_SMALL: Final = "\0 abcdefghijklmnopqrstuvwxyz"
"""Codes of five bits; 0 ends a text."""
_LETTERS: Final = "\0 ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
"""Codes of six bits; 0 ends a text."""
_OF_SMALL, _OF_LETTERS, _OF_CHARACTER = 1 << 30, 1 << 29, 1 << 28
"""The bit that says how an ID holds its text: as small letters, as letters and digits, as a code point."""
_WORDS = (
    "a about after again all also and are as at be can do each end few first for from go good "
    "has have if in into is it like line long made make many more most much new no not now of on "
    "one open or out over part read same see set so some step take than that the them then there "
    "these they thing this time to two under up use was water way we well what when where which "
    "while will with word work world year you"
)


def encode(text: str) -> list[int]:
    """Return the IDs of a text's tokens."""
    return [_id_of(piece) for piece in _PIECE.findall(text)]


def _id_of(piece: str) -> int:
    if len(piece) == 1:
        # Half of a pair, which JSON can carry, is no text that an answer can have.
        return _OF_CHARACTER | ord("\ufffd" if "\ud800" <= piece <= "\udfff" else piece)
    if set(piece) <= set(_SMALL):
        return _OF_SMALL | _packed(piece, _SMALL, 5)
    return _OF_LETTERS | _packed(piece, _LETTERS, 6)


def _packed(piece: str, alphabet: str, bits: int) -> int:
    return sum(alphabet.index(letter) << bits * place for place, letter in enumerate(piece))


def _unpacked(value: int, alphabet: str, bits: int) -> str:
    text = ""
    while value > 0 and value % (1 << bits) < len(alphabet):
        text += alphabet[value % (1 << bits)]
        value >>= bits
    return "" if value else text


def decode(tokens: Iterable[int]) -> str:
    """Return the text of tokens, without special ones."""
    return "".join(token_text(token) for token in tokens if token not in _SPECIAL)


def is_token(token: int) -> bool:
    """Return whether an ID is in the vocabulary."""
    return 0 <= token < PLAIN_IDS or bool(_text_of(token))


def token_text(token: int) -> str:
    """Return the text of one token. An ID that `encode` does not give is shown as a word of its own."""
    return _SPECIAL.get(token) or _text_of(token) or f" t{token}"


def _text_of(token: int) -> str:
    """Return the text that an ID holds; empty if `encode` gives no such ID."""
    if token & _OF_SMALL:
        text = _unpacked(token ^ _OF_SMALL, _SMALL, 5)
    elif token & _OF_LETTERS:
        text = _unpacked(token ^ _OF_LETTERS, _LETTERS, 6)
    elif _OF_CHARACTER <= token <= _OF_CHARACTER + 0x10FFFF:
        text = chr(token ^ _OF_CHARACTER)
    else:
        return ""
    return text if encode(text) == [token] else ""


TOKENS = tuple(encode(f" {word}")[0] for word in _WORDS.split() if len(word) < MAX_CHARACTERS)
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
