"""Steps of the wall clock of every Python process that has this folder on its path, children included.

CLOCK_STEP names a file with eight bytes: the seconds, as a float, by which `time.time` is ahead. They may change at
any time, as the clock of a node may that was wrong.
"""

import mmap
import os
import struct
import time


def step_clock(path: str) -> None:
    """Let `time.time` follow a file."""
    with open(path, "rb") as file:  # noqa: PTH123 - each interpreter imports this; pathlib would come with it
        ahead = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    now = time.time
    time.time = lambda: now() + struct.unpack_from("<d", ahead)[0]


if "CLOCK_STEP" in os.environ:
    step_clock(os.environ["CLOCK_STEP"])
