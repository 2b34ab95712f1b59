"""The bytes of held requests."""

from __future__ import annotations

from collections.abc import Hashable

OVERHEAD_BYTES = 16 * 1024
"""Bytes that a held request takes beside its body: its connection, task and headers."""


class HoldBudget:
    """The budget of bytes of held requests. Each owner may hold at most as many as remain free.

    A request has two owners, its tenant and its service: neither one tenant nor the requests for one
    service keep those of others out.
    """

    def __init__(self, total_bytes: int) -> None:
        self.held_bytes = 0
        self._total_bytes = total_bytes
        self._of_owners: dict[Hashable, int] = {}

    def take(self, owners: tuple[Hashable, ...], size: int) -> bool:
        """Reserve bytes for a request. Return False if one of its owners already holds too many."""
        free = self._total_bytes - self.held_bytes - size
        if any(self._of_owners.get(owner, 0) + size > free for owner in owners):
            return False
        self.held_bytes += size
        for owner in owners:
            self._of_owners[owner] = self._of_owners.get(owner, 0) + size
        return True

    def give_back(self, owners: tuple[Hashable, ...], size: int) -> None:
        """Release bytes of a request."""
        self.held_bytes -= size
        for owner in owners:
            self._of_owners[owner] -= size
            if not self._of_owners[owner]:
                del self._of_owners[owner]
