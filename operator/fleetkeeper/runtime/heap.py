"""The garbage collector, for a process whose large heap hardly changes.

Reference counting frees what the operator drops; cycles are rare. So the collector may look seldom,
and at what is new only.
"""

from __future__ import annotations

import gc
from typing import Final

YOUNG_OBJECTS: Final = 50_000
"""Containers made and kept before the collector looks at them; Python's own value is 700.

One answer of Prometheus for 1,000 services is 30,000 of them, all alive until it is read: at 700 the
collector takes 40% of the time of reading it.
"""


def look_seldom() -> None:
    """At the start of the process."""
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def settle() -> None:
    """Once the caches are full: what was read at the start stays, and is not looked at again."""
    gc.collect()
    gc.freeze()
