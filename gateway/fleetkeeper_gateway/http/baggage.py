"""W3C Baggage: keeps the client's entries, and carries the grant in an entry of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fleetkeeper_contract.grants import GRANT_BAGGAGE_KEY, MAX_HOPS
from fleetkeeper_gateway.http.errors import Refusal


class GrantReader(Protocol):
    """Verifies grants that this gateway, or a gateway with the same keys, signed."""

    def hops_of(self, grant: str) -> int | None:
        """Return the number of gateways that a request with this grant passed; None if the grant is not valid."""


def split_baggage(values: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the client's own entries, and the grants among all entries."""
    kept: list[str] = []
    grants: list[str] = []
    for value in values:
        for entry in value.split(","):
            key, _, rest = entry.partition("=")
            if key.partition(";")[0].strip().lower() == GRANT_BAGGAGE_KEY:
                grants.append(rest.partition(";")[0].strip())
            elif entry.strip():
                kept.append(entry.strip())
    return kept, grants


def next_hop(grants: Iterable[str], reader: GrantReader) -> int:
    """Return the number of gateways that the request will have passed, this one included.

    Raises:
        Refusal: 508 if it passed too many, which means a loop.
    """
    hops = 1 + max((reader.hops_of(grant) or 0 for grant in grants), default=0)
    if hops > MAX_HOPS:
        raise Refusal(
            508,
            "loop_detected",
            f"The request passed {MAX_HOPS} gateways. The model's service sends it back to a gateway.",
            kind="server_error",
        )
    return hops
