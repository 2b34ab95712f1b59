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
    """Which part of a list is asked for."""

    limit: int
    after: str | None = None
    ascending: bool = False
    """Oldest first."""
    purpose: str | None = None

    def cut(
        self, newest_first: Sequence[str], missing: Callable[[str, str], Refusal]
    ) -> tuple[Sequence[str], bool]:
        """Return the IDs of the page, and whether more follow.

        Args:
            newest_first: all IDs.
            missing: returns the refusal of an ID, and the parameter that has it.

        Raises:
            Refusal: if `after` names none of them.
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
    """Return the page that a query asks for. Unknown parameters are ignored.

    Args:
        query: the query string.
        default: items, if the query names no limit.
        most: the highest limit.

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
