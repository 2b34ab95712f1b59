"""Lists of objects, page by page. An object that cannot be decoded hides no other.

Any user who may create an object can nest its managedFields deeper than Python decodes. A page with such an
object is read again in smaller pages, until the object is alone and a stand-in takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from fleetkeeper_kube.bounds import GROWTH, decoded, page_of_one
from fleetkeeper_kube.errors import NotTaken

PAGE: Final = 200

Fetch = Callable[[dict[str, str | int]], bytes]
"""Returns the content of a page for the parameters `limit` and `continue`."""


def read_pages(fetch: Fetch) -> Iterator[dict[str, Any]]:
    """Yield the pages of a list.

    Raises:
        ApiError: a page is not JSON, or has an object that does not say which one it is.
    """
    limit, more = PAGE, ""
    while True:
        try:
            page = decoded(fetch({"limit": limit, **({"continue": more} if more else {})}))
        except NotTaken as problem:
            if limit > 1:
                limit = max(1, limit // GROWTH)
                continue
            page = page_of_one(problem)
        yield page
        limit, more = min(PAGE, limit * GROWTH), (page.get("metadata") or {}).get("continue") or ""
        if not more:
            return
