"""Names in Redis, and numbers of leases."""

from __future__ import annotations

PREFIX = "fleetkeeper:batch:"
"""Of every key of the queue. A new epoch deletes what has it, and nothing else."""
EPOCH = f"{PREFIX}epoch".encode()
WAKE = f"{PREFIX}wake".encode()
CLASS_S = 3600
"""Width of a class of deadlines."""
FENCE_BITS = 40
"""Fences of epoch n begin above n * 2 ** FENCE_BITS."""
ATTEMPTS = 1000
"""A lease in Redis: its number in the epoch * ATTEMPTS + the attempt (`lease_of` in common.lua)."""


def tick_key(process: str) -> bytes:
    """Return the key that counts what a process was told."""
    return f"{PREFIX}process:{process}".encode()


def fence_base(epoch: int) -> int:
    """Return the number above which the fences of an epoch begin."""
    return epoch << FENCE_BITS


def lease_of(fence: int, epoch: int, attempt: int) -> int:
    """Return a lease as Redis keeps it. Of another epoch it is none that Redis has."""
    return (fence - fence_base(epoch)) * ATTEMPTS + attempt


def class_of(expires: int) -> int:
    """Return the class of a deadline."""
    return expires // CLASS_S
