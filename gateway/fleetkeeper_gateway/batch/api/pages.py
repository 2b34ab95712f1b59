"""Pages of lists: `after`, `limit` and `order` of a query. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from fleetkeeper_gateway.batch.api.checks import invalid
from fleetkeeper_gateway.http.errors import Refusal

_MAX_FIELDS = 32


@dataclass(frozen=True, slots=True)
class Page:
    """The requested part of a list."""

    limit: int
    after: str | None = None
    ascending: bool = False
    """True for the oldest first."""
    purpose: str | None = None

    def cut(
        self, newest_first: Sequence[str], missing: Callable[[str, str], Refusal]
    ) -> tuple[Sequence[str], bool]:
        """Return the IDs of the page, and whether more follow.

        Args:
            newest_first: all IDs.
            missing: returns the refusal for an unknown ID and the name of its parameter.

        Raises:
            Refusal: if `after` names none of the IDs.
        """
        ids = newest_first[::-1] if self.ascending else newest_first
        start = 0
        if self.after is not None:
            if self.after not in ids:
                raise missing(self.after, "after")
            start = 1 + ids.index(self.after)
        end = start + self.limit
        return ids[start:end], end < len(ids)


def parse_page(query: bytes, *, default: int, most: int) -> Page:
    """Parse the page that a query requests. Unknown parameters are ignored.

    Args:
        query: the query string.
        default: the limit of a query without one.
        most: the maximum limit.

    Raises:
        Refusal: if a value is invalid.
    """
    try:
        fields = dict(
            parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        )
    except ValueError:
        raise invalid("query", f"It has more than {_MAX_FIELDS} parameters.") from None
    limit = fields.get("limit", str(default))
    if not re.fullmatch("[0-9]{1,6}", limit) or not 1 <= int(limit) <= most:
        raise invalid("limit", f"It must be from 1 to {most}.")
    order = fields.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "It must be asc or desc.")
    return Page(int(limit), fields.get("after"), order == "asc", fields.get("purpose"))
