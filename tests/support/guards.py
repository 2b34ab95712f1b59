"""How long a test waits for an event before it fails."""

from __future__ import annotations

from typing import Final

GUARD_S: Final = 240.0
"""The limit of a wait that an event ends, so it only bounds how long a failure takes.

It is less than the 290 s of a watch and the 300 s to the operator's next resync: what comes within it
came by an event.
"""
