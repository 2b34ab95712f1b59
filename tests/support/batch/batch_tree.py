"""The processes of one batch process: its workers, their memory, and how a test stops all of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import psutil
import yaml

from tests.support.batch.batch_process import BatchProcess
from tests.support.chart.helm_chart import CHART

SAMPLE_S = 0.25
MIB = 1 << 20
_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def tree_of(process: BatchProcess) -> list[psutil.Process]:
    """Return the process and all that it has started, those that were started first before others."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def workers_of(process: BatchProcess) -> list[psutil.Process]:
    """Return the worker processes: the children of the server from which they are forked."""
    return [
        worker
        for child in psutil.Process(process.pid).children()
        if "multiprocessing.forkserver" in " ".join(child.cmdline())
        for worker in child.children()
    ]


async def a_worker(process: BatchProcess) -> psutil.Process:
    """Wait until there is a worker process, and return the one that used the processor most."""
    found: list[psutil.Process] = []

    def there() -> bool:
        found[:] = workers_of(process)
        return bool(found)

    await process.until(there, "there is no worker process")
    return max(found, key=lambda worker: worker.cpu_times().user)


@contextlib.contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop processes; they go on after the body."""
    for one in processes:
        one.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGCONT)


def memory_limit() -> int:
    """Return the bytes that the chart lets a batch pod have by default."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = str(values["gateway"]["batch"]["resources"]["limits"]["memory"])
    return int(text[:-2]) * _UNITS[text[-2:]]


@dataclass
class Memory:
    """What the processes of one batch process have had in memory, together."""

    process: BatchProcess
    most: int = 0
    """Bytes. Pages that processes share count once."""
    by_process: dict[str, int] = field(default_factory=dict)
    """At that time."""

    def sample(self) -> None:
        """Note what they have now."""
        now = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in tree_of(self.process):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    now[f"{one.name()} {one.pid}"] = one.memory_full_info().pss
        if sum(now.values()) > self.most:
            self.most, self.by_process = sum(now.values()), now

    def check(self, what: str) -> None:
        """Print the peak, and compare it with the limit of the pod."""
        limit = memory_limit()
        sizes = ", ".join(f"{size // MIB}" for size in sorted(self.by_process.values())[::-1])
        print(f"memory, {what}: {self.most // MIB} MiB of {limit // MIB} ({sizes})", flush=True)
        assert 0 < self.most < limit, what


@contextlib.asynccontextmanager
async def watched_memory(process: BatchProcess, what: str) -> AsyncIterator[Memory]:
    """Watch the memory of a batch process during the body, and check it at the end."""
    memory = Memory(process)

    async def watch() -> None:
        while True:
            await asyncio.to_thread(memory.sample)
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.create_task(watch())
    try:
        yield memory
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    memory.check(what)
