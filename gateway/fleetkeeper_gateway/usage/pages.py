"""Validates a page of an engine's ledger, which comes from a tenant's pod and is not trusted. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from fleetkeeper_contract.tiers import TIER_BY_LABEL

MAX_COUNT = 2**53
MAX_PAGE_ENTRIES = 1_000
MAX_PAGE_TOKENS = 2**40
"""Maximum tokens of all entries of a page, and of the reported losses. No engine counts so many in months."""

Count = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)]
Identifier = Annotated[str, StringConstraints(max_length=256)]


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Tokens(_Read):
    """Counts of tokens."""

    prompt: Count = 0
    cached: Count = 0
    answer: Count = 0


NO_TOKENS = Tokens()


class Entry(Tokens):
    """The counts of one HTTP request."""

    n: Count
    attempt: Identifier | None
    request: Identifier | None
    key: Identifier | None
    tier: Identifier | None
    model: Identifier
    aborted: bool
    time: float = Field(allow_inf_nan=False)

    def without_grant(self) -> Entry:
        """Return the same counts without a key."""
        return self.model_copy(update={"attempt": None, "key": None})

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.tier is not None and self.tier not in TIER_BY_LABEL:
            raise ValueError(f"tier {self.tier!r} is unknown")
        if (self.attempt is None) != (self.key is None):
            raise ValueError("attempt and key come together")
        return self


class Page(_Read):
    """Entries in the order of their numbers."""

    boot: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    next: Count
    newest: Count
    counting: bool
    errors: Count
    entries: Annotated[tuple[Entry, ...], Field(max_length=MAX_PAGE_ENTRIES)]
    totals: Tokens | None
    """All tokens up to `next`; None if the page has no entry to derive them from."""
    lost: Count

    @model_validator(mode="after")
    def _whole(self) -> Self:
        numbers = [entry.n for entry in self.entries]
        rising = all(number < other for number, other in pairwise(numbers))
        if not rising or (numbers and numbers[-1] > self.next) or self.next > self.newest:
            raise ValueError("numbers are not in order")
        if (
            sum(entry.prompt + entry.cached + entry.answer for entry in self.entries)
            > MAX_PAGE_TOKENS
        ):
            raise ValueError(f"the entries have more than {MAX_PAGE_TOKENS} tokens together")
        return self


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place up to which one pod's ledger was read."""

    pod: str
    """UID."""
    boot: str = ""
    next: int = 0
    totals: Tokens = NO_TOKENS
    """All tokens of the ledger up to this place, read or lost."""
    seen: float = 0.0
    """Unix seconds of the last reading."""

    def document(self) -> dict[str, object]:
        """Return the cursor as a commit contains it."""
        totals = [self.totals.prompt, self.totals.cached, self.totals.answer]
        return {
            "pod": self.pod,
            "boot": self.boot,
            "next": self.next,
            "totals": totals,
            "seen": round(self.seen),
        }

    @classmethod
    def of_document(cls, found: dict[str, object]) -> Cursor:
        """Return the cursor of a commit.

        Raises:
            ValueError: if the document is not a cursor.
        """
        known = _CursorDocument.model_validate(found)
        prompt, cached, answer = known.totals
        totals = Tokens(prompt=prompt, cached=cached, answer=answer)
        return cls(known.pod, known.boot, known.next, totals, known.seen)


class _CursorDocument(_Read):
    pod: str
    boot: str
    next: int
    totals: tuple[int, int, int]
    seen: float
