"""The versions of deleted objects: an older response may still arrive."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

TOMBSTONES: Final = 2000
"""Number of deleted objects remembered. A write is answered within 4 s, so few are needed."""


class Tombstones:
    """The last deleted objects, by kind, namespace and name."""

    def __init__(self) -> None:
        self._gone: OrderedDict[tuple[str, str, str], int] = OrderedDict()

    def bury(self, address: tuple[str, str, str], version: int) -> None:
        """Remember that an object was gone as of `version`."""
        self._gone[address] = max(version, self._gone.get(address, 0))
        self._gone.move_to_end(address)
        if len(self._gone) > TOMBSTONES:
            self._gone.popitem(last=False)

    def covers(self, address: tuple[str, str, str], version: int) -> bool:
        """Return whether this version of an object is one from before its deletion."""
        return version <= self._gone.get(address, -1)
