"""What one replica holds for a key while it has requests: so that they do not overtake one another.

Between replicas nothing is locked. Two that accept at the same moment may exceed a quota by one.
"""

from __future__ import annotations

import asyncio
from typing import Final
from weakref import WeakValueDictionary

MAX_UPLOADS: Final = 8
"""Uploads of one key that are read at the same time. Others wait, so the store holds no more unfinished files."""

MAX_DOWNLOADS: Final = 8
"""Files of one key that are sent at the same time. Others wait, so slow readers hold no more parts in memory."""


class Turns:
    """The turns of one key's requests."""

    def __init__(self) -> None:
        self.change = asyncio.Lock()
        """Held from a check of what the key has until the change that depends on it."""
        self.uploads = asyncio.Semaphore(MAX_UPLOADS)
        self.downloads = asyncio.Semaphore(MAX_DOWNLOADS)


class PerKey:
    """The turns of all keys that have requests."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()

    def turns(self, key_id: str) -> Turns:
        """Return the turns of a key. They are the same while somebody holds them.

        A lock alone does not hold them: keep what this returns until the lock is given back.
        """
        turns = self._turns.get(key_id)
        if turns is None:
            turns = self._turns[key_id] = Turns()
        return turns
