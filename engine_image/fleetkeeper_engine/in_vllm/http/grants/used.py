"""The grants that an engine has accepted, so that each is accepted once. Pure."""

from __future__ import annotations

from fleetkeeper_contract.grants import GRANT_LEEWAY_SECONDS
from fleetkeeper_engine.in_vllm.http.grants.identity import GrantIdentity

MAX_REMEMBERED = 131_072
"""About 30 MB. 2,000 requests a second fill it, because a use is remembered for 65 s at most."""


class UsedGrants:
    """The uses of grants that cannot be repeated, with the time until the grants would be refused as expired."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._until: dict[str, float] = {}
        self._max = max_remembered

    def __len__(self) -> int:
        """Return the number of remembered grants."""
        return len(self._until)

    def is_full(self, now: float) -> bool:
        """Return whether no other grant can be remembered. Forgetting one early would let it be used again."""
        until = self._until
        while until:
            oldest = next(iter(until))
            if until[oldest] >= now:
                break
            del until[oldest]
        return len(until) >= self._max

    def claim(self, identity: GrantIdentity, purpose: str = "") -> Claim | None:
        """Reserve a grant for one request; None if another request for the same purpose has or had it.

        Args:
            identity: who sent the request.
            purpose: a prefix-aware router first has the prompt tokenized, with the same grant. It
                does so for another purpose than the generation that follows.
        """
        use = f"{purpose} {identity.attempt}"
        if use in self._until:
            return None
        self._until[use] = identity.expires + GRANT_LEEWAY_SECONDS
        return Claim(self, use)

    def forget(self, use: str) -> None:
        """Make a grant usable again."""
        self._until.pop(use, None)


class Claim:
    """A grant that one request has. It counts as used once vLLM gets the request.

    A router sends a request that was refused before, with the same headers, to another replica or
    to this one again.
    """

    __slots__ = ("_grants", "_use")

    def __init__(self, grants: UsedGrants, use: str) -> None:
        self._grants: UsedGrants | None = grants
        self._use = use

    def use(self) -> None:
        """Keep the grant for good."""
        self._grants = None

    def release(self) -> None:
        """Return the grant, unless it was used. Idempotent."""
        grants, self._grants = self._grants, None
        if grants is not None:
            grants.forget(self._use)
