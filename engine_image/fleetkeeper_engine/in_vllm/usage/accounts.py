"""Accounts: which tokens of the engine belong to which HTTP request.

The middleware opens an account for a request and makes it the current one of its task. vLLM
registers the request's sequences in the same task, or in tasks that inherit its context: several for
`n` > 1, for several prompts, and for rounds of tool calls. Counting a token looks one sequence up. No
task is woken for it.

An account is entered in the ledger when the request has ended and no sequence of it is left. Both
orders occur: after a hang-up, vLLM may count a few more steps before it aborts the sequence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.shm.ledger import Entry, LedgerWriter, Tokens, path_of_environment

logger = logging.getLogger("vllm.fleetkeeper")


class Identity(Protocol):
    """The sender of a request, from its grant."""

    @property
    def attempt(self) -> str:
        """Return the ID of this attempt to send it."""

    @property
    def request(self) -> str:
        """Return the ID of the request."""

    @property
    def key(self) -> str:
        """Return the ID of the client's key."""


@dataclass(eq=False, slots=True)
class Account:
    """The tokens of one HTTP request, or of one sequence that no request stands for."""

    identity: Identity | None = None
    tier: Tier | None = None
    adapter: str = ""
    prompt: int = 0
    cached: int = 0
    answer: int = 0
    sequences: set[str] = field(default_factory=set)
    """Sequences that vLLM processes."""
    used: bool = False
    """True if a sequence was added since the last entry."""
    ended: bool = False
    """True once the HTTP request is over."""
    aborted: bool = False


CURRENT: ContextVar[Account | None] = ContextVar("fleetkeeper_account", default=None)
"""The account of the request that this task works for."""


class Accounts:
    """All accounts of one API server. No method raises: a defect here must not fail a request."""

    def __init__(self, ledger: LedgerWriter, wall: Callable[[], float] = time.time) -> None:
        self._ledger = ledger
        self._wall = wall
        self._sequences: dict[str, Account] = {}
        self._reported = False

    @classmethod
    def of_environment(cls) -> Accounts | None:
        """Return the accounts of this pod; None without a run directory, or if it cannot be written."""
        path = path_of_environment()
        if path is None:
            return None
        try:
            return cls(LedgerWriter.open(path))
        except OSError:
            logger.exception("usage is not counted: the ledger %s cannot be opened", path)
            return None

    def set_counting(self, counting: bool) -> None:
        """Note whether vLLM's outputs reach `count`."""
        try:
            self._ledger.set_state(counting=counting)
        except OSError as problem:
            self.report(problem)

    def open(self, identity: Identity | None, tier: Tier | None) -> Account:
        """Open the account of a request."""
        return Account(identity, tier)

    def end(self, account: Account) -> None:
        """End a request. Its entry follows once its sequences have ended too."""
        account.ended = True
        if not account.sequences:
            self._enter(account, called=True)

    def add(self, sequence: str, adapter: str) -> None:
        """Add a sequence to the current account, or to one of its own."""
        self._add(sequence, adapter, CURRENT.get())

    def count(self, sequence: str, prompt: int, cached: int, answer: int) -> None:
        """Count tokens of a sequence. A negative count is an error, and no token."""
        if min(prompt, cached, answer) < 0:
            self.report(ValueError(f"vLLM counted {prompt}, {cached} and {answer} tokens"))
            prompt, cached, answer = max(0, prompt), max(0, cached), max(0, answer)
        account = self._sequences.get(sequence)
        if account is None:
            account = self._add(sequence, "", None)
        account.answer += answer
        account.prompt += prompt
        account.cached += cached

    def remove(self, sequence: str, *, aborted: bool) -> None:
        """End a sequence: vLLM counts none of its tokens any more."""
        account = self._sequences.pop(sequence, None)
        if account is None:
            return
        account.sequences.discard(sequence)
        account.aborted |= aborted
        if account.ended and not account.sequences:
            self._enter(account)

    def remove_all(self) -> None:
        """End all sequences: the engine is dead."""
        for sequence in list(self._sequences):
            self.remove(sequence, aborted=True)

    def report(self, problem: Exception) -> None:
        """Log the first problem, and count each in the ledger."""
        if not self._reported:
            self._reported = True
            logger.error("usage is not counted completely", exc_info=problem)
        try:
            self._ledger.set_state(errors=1)
        except OSError:
            # The number of errors is in memory; the next successful write records it.
            return

    def _add(self, sequence: str, adapter: str, account: Account | None) -> Account:
        if account is None:
            account = Account(ended=True)
        account.sequences.add(sequence)
        account.used = True
        account.adapter = account.adapter or adapter
        self._sequences[sequence] = account
        return account

    def _enter(self, account: Account, *, called: bool = False) -> None:
        """Enter what was counted since the last entry.

        Args:
            account: an account without sequences.
            called: the request ended just now. With a grant it gets an entry in any case, so that
                the gateway can return the tokens that it reserved.
        """
        identity = account.identity
        if not account.used and (identity is None or not called):
            return
        entry = Entry(
            Tokens(account.prompt, account.cached, account.answer),
            self._wall(),
            attempt="" if identity is None else identity.attempt,
            request="" if identity is None else identity.request,
            key="" if identity is None else identity.key,
            adapter=account.adapter,
            tier=account.tier,
            aborted=account.aborted,
        )
        # A task that outlives its request may add another sequence; that becomes a second entry.
        account.prompt = account.cached = account.answer = 0
        account.used = False
        try:
            self._ledger.write(entry)
        except OSError as problem:
            self.report(problem)
