"""The prefix cache: which blocks of prompts the KV cache holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fleetkeeper_steps.running import BLOCK_TOKENS


class PrefixCache:
    """The last prompt blocks, by a hash of all tokens up to their end.

    vLLM also finds generated tokens again, and gives shared blocks to several sequences. Here each sequence
    holds blocks of its own.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._known: dict[int, None] = {}

    def cached_tokens(self, hashes: Sequence[int]) -> int:
        """Return the tokens at the start of a prompt that need no computation."""
        found = 0
        for block in hashes:
            if block not in self._known:
                break
            found += 1
        return found * BLOCK_TOKENS

    def add(self, hashes: Sequence[int]) -> None:
        """Keep the blocks of a computed prompt. The oldest go, of one prompt the last first."""
        for block in reversed(hashes):
            self._known.pop(block, None)
            self._known[block] = None
        while len(self._known) > self._max_blocks:
            del self._known[next(iter(self._known))]


def block_hashes(prompt: Sequence[int], salt: str | None) -> list[int]:
    """Return a hash for each whole block but the last token's: vLLM computes at least one token."""
    last, hashes = hash(salt), []
    for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS):
        last = hash((last, *prompt[end - BLOCK_TOKENS : end]))
        hashes.append(last)
    return hashes
