"""Worker processes for tests of their parent, and a parent for tests of its end. Each does what its name says."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.going_on import happens_within
from fleetkeeper_gateway.batch.processes.link import end_with_parent
from fleetkeeper_gateway.batch.processes.pool import Pool, Slot
from fleetkeeper_gateway.batch.workers.handling import Handling, create_memory
from fleetkeeper_gateway.server import bound_memory

BATCH = f"batch_{7:032x}"
LINE = 3

Child = Callable[[socket.socket, Any], None]


def listen(parent: socket.socket, _memory: Any) -> None:
    """Say something until the parent ends, and end on SIGTERM."""
    end_with_parent()
    asyncio.run(_listen(parent))


def work_for_ever(parent: socket.socket, _memory: Any) -> None:
    """Let no event loop take a turn, until the parent ends."""
    end_with_parent()
    parent.sendall(_counted(1))
    while True:
        pass


def die_while_handling(_parent: socket.socket, memory: Any) -> None:
    """End as a process that was killed in the middle of an answer."""
    with Handling(memory)(BATCH, LINE):
        os.kill(os.getpid(), signal.SIGKILL)


def handle_until_the_end(parent: socket.socket, memory: Any) -> None:
    """Handle one answer for ever, whatever the parent says."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Handling(memory)(BATCH, LINE):
        parent.sendall(_counted(1))
        time.sleep(600)


def say_nonsense(parent: socket.socket, memory: Any) -> None:
    """Say what is no message while an answer is handled."""
    with Handling(memory)(BATCH, LINE):
        parent.sendall(b"{no message}\n")
        time.sleep(600)


def need_too_much(parent: socket.socket, memory: Any) -> None:
    """Handle an answer that needs more memory than there is for it."""
    bound_memory(64 * 1024 * 1024)
    parent.sendall(_counted(1))
    with Handling(memory)(BATCH, LINE):
        try:
            bytearray(1 << 30)
        except MemoryError:
            os.kill(os.getpid(), signal.SIGKILL)


def count_and_die(parent: socket.socket, memory: Any) -> None:
    """Say what was counted, and end after an answer was handled."""
    parent.sendall(_counted(5))
    with Handling(memory)(BATCH, LINE):
        pass
    os._exit(1)


def ask_for_a_route(parent: socket.socket, _memory: Any) -> None:
    """Ask for a route, and count its length."""
    parent.sendall(json.dumps({"route": ["key-1", "m"]}).encode() + b"\n")
    answer = json.loads(parent.makefile().readline())
    parent.sendall(_counted(len(answer["route"][2])))
    time.sleep(600)


def _counted(value: float) -> bytes:
    series = ["fleetkeeper_gateway_batch_lines", "fleetkeeper_gateway_batch_lines_total"]
    found = [
        [[*series, [["outcome", "ok"]]], value],
        [["fleetkeeper_gateway_batch_running_lines"] * 2 + [[]], value],
    ]
    return json.dumps({"measured": found}).encode() + b"\n"


async def _listen(parent: socket.socket) -> None:
    """Count one line, and say so again and again, from when it can be told to end."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    while not await happens_within(stopping, 0.01):
        parent.sendall(_counted(1))


def slot_of(child: Child, name: str = "w-0") -> Slot:
    """Return a slot whose processes do something."""
    context, memory = multiprocessing.get_context("forkserver"), create_memory()
    context.set_forkserver_preload([listen.__module__])
    return Slot(
        name,
        Handling(memory),
        lambda theirs: context.Process(target=child, args=(theirs, memory), daemon=True),
        lambda: None,
    )


async def _parent() -> None:
    """Run two processes, and print their numbers once they live."""
    none: Any = None
    slots = [slot_of(listen, "w-0"), slot_of(work_for_ever, "w-1")]
    pool = Pool(slots, none, none, route=none, shown=metrics.OfAllProcesses(), stop_s=0)
    running = asyncio.create_task(pool.run())
    while any(slot.process is None for slot in slots):  # noqa: ASYNC110 - a pool has no event for it
        await asyncio.sleep(0.01)
    pids = [str(slot.process.pid) for slot in slots if slot.process is not None]
    sys.stdout.write(f"pids {' '.join(pids)}\n")
    sys.stdout.flush()
    await running


if __name__ == "__main__":
    asyncio.run(_parent())
