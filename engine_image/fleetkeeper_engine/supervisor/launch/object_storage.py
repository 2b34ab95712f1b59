"""Streaming of a model from object storage: is it possible here, and with how much memory?

vLLM's loader `runai_streamer` reads the weights of an s3:// model into a ring of buffers in main
memory and copies them from there. Its default for the buffers is 40 GB, so the plan sets their size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError

SCHEME = "s3://"
LOAD_FORMAT = "runai_streamer"
BUFFER_VARIABLE = "RUNAI_STREAMER_MEMORY_LIMIT"
MODULES = ("runai_model_streamer", "runai_model_streamer_s3", "boto3")
GIB = 1024**3
MIB = 1024**2
BUFFER_BYTES = 2 * GIB
"""The size of the buffers of one rank if there is room. More brings little: the streamer's authors
measured 6% from one buffer to two, and 1.5% from two to four."""
POD_SHARE = 4
"""If devices have memory of their own, the buffers of all ranks take at most this part of the pod's memory: a quarter."""


def is_object_storage(source: str) -> bool:
    """Return whether a model's source is in object storage."""
    return source.startswith(SCHEME)


def require_streamer(find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raise `StartRefusedError` (BadEngineOption) if this image cannot stream from object storage."""
    missing = [name for name in MODULES if find(name) is None]
    if missing:
        raise StartRefusedError(
            DeathClass.BAD_ENGINE_OPTION,
            f"this engine image lacks {', '.join(missing)}, which an s3:// model needs; use an engine "
            "profile whose image has runai-model-streamer[s3], or a pvc:// or hf:// model",
        )


def desired_buffer_bytes(*, largest_bytes: int, room_bytes: int, ranks: int) -> int:
    """Return the size of the streamer's buffers in one rank. All ranks together stay within the room.

    A rank also holds a copy of the tensor that it loads.

    Args:
        largest_bytes: the stored size of the largest tensor, which a buffer must hold.
        room_bytes: the main memory that is free while the weights are loaded.
        ranks: processes that load at the same time.

    Raises:
        StartRefusedError: HostOutOfMemory with the sum, if a buffer cannot hold the largest tensor.
    """
    room = room_bytes // ranks - largest_bytes
    if room < largest_bytes:
        needed = 2 * ranks * largest_bytes
        raise StartRefusedError(
            DeathClass.HOST_OUT_OF_MEMORY,
            f"to stream the largest tensor, {_mib(largest_bytes)}, {ranks} rank(s) need "
            f"{_mib(needed)} of main memory, but {_mib(max(0, room_bytes))} is left for it; raise resources.memory",
        )
    return min(room, max(BUFFER_BYTES, largest_bytes))


def _mib(amount_bytes: int) -> str:
    return f"{amount_bytes / MIB:.0f} MiB"
