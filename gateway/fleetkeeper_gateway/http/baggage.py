"""W3C Baggage: the client's entries are kept, and the grant travels in an entry of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fleetkeeper_contract.grants import GRANT_BAGGAGE_KEY, MAX_HOPS
from fleetkeeper_gateway.http.errors import Refusal


class GrantReader(Protocol):
    """Reads grants that this gateway, or one with the same keys, signed."""

    def hops_of(self, grant: str) -> int | None:
        """Return the gateways that a request with this grant passed; None if it is no valid grant."""


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
        Refusal: 508 if it passed too many; it goes round in a circle.
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
