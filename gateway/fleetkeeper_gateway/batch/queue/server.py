"""What a Redis server says of itself, and of the epoch that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper_gateway.batch.queue.names import EPOCH
from fleetkeeper_gateway.limits.pipe import Pipe


class Unfit(Exception):
    """The server cannot hold the queue at the moment, or another process works on it."""


@dataclass(frozen=True, slots=True)
class ServerEpoch:
    """The epoch in Redis. Number 0: there is none."""

    number: int = 0
    ready: bool = False
    run_id: str = ""
    beat: int = 0
    """Grows while a process makes this epoch."""


async def run_id_of(pipe: Pipe, call_s: float) -> str:
    """Return the run_id of the server.

    Raises:
        Unfit: the server is a copy of another one, or drops keys when it is full.
    """
    server = _fields(await pipe.command(b"INFO", b"server", budget_s=call_s))
    replication = _fields(await pipe.command(b"INFO", b"replication", budget_s=call_s))
    if replication.get("role") != "master":
        raise Unfit(
            f"the server's role is {replication.get('role')}; BATCH_REDIS_URL must lead to the primary"
        )
    memory = _fields(await pipe.command(b"INFO", b"memory", budget_s=call_s))
    policy = memory.get("maxmemory_policy", "")
    if policy.startswith("allkeys-") and memory.get("maxmemory") != "0":
        raise Unfit(
            f"the server's maxmemory-policy is {policy}, so it drops lines when it is full; "
            "set it to noeviction"
        )
    return server["run_id"]


async def epoch_of(pipe: Pipe, call_s: float) -> ServerEpoch:
    """Return the epoch that the server holds."""
    names = (b"number", b"state", b"run_id", b"beat")
    found: object = await pipe.command(b"HMGET", EPOCH, *names, budget_s=call_s)
    if not isinstance(found, list) or found[0] is None:
        return ServerEpoch()
    number, state, run_id, beat = (each or b"" for each in found)
    return ServerEpoch(int(number), state == b"ready", run_id.decode(), int(beat or 0))


def _fields(info: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in info.decode().splitlines())
    return {name: value for name, separator, value in lines if separator}
