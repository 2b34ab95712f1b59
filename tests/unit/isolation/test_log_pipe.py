"""A log that nobody reads stops nothing: neither the engine, nor the probes, nor the end of the pod."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.spec import parse_document
from fleetkeeper_engine.supervisor.control_api.auth import Verifier
from fleetkeeper_engine.supervisor.control_api.server import ControlPort, serve_control
from fleetkeeper_engine.supervisor.memory.watch import MemoryState
from fleetkeeper_engine.supervisor.output import MAX_BYTES, Outlet, logging_through
from fleetkeeper_engine.supervisor.process import Reaper
from fleetkeeper_engine.supervisor.state import PodState
from tests.support.guards import GUARD_S

WORDY = "import sys\nfor _ in range(64): sys.stdout.write('x' * 65535 + chr(10))\nprint('the end')"
DOCUMENT = '{"contract": 1, "accelerator": "cpu", "model": {"source": "/m", "servedName": "m"}}'


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its reading and its writing end; nobody reads."""
    reading, writing = os.pipe()
    yield reading, writing
    # A thread that still writes ends with an error once the reading end is closed. The writing end
    # stays open: the next test's pipe could get its number while that thread writes.
    os.close(reading)


async def test_probes_answer_and_the_child_runs_on_while_nobody_reads_the_output(
    pipe: tuple[int, int], tmp_path: Path, unused_tcp_port: int
) -> None:
    """4 MiB of output into a pipe of 64 KiB: vLLM never waits, and so does not look hung."""
    output = Outlet(pipe[1])
    pod = PodState(
        document=parse_document(DOCUMENT),
        region=Region.create(tmp_path / "page"),
        memory=MemoryState(cap_ratio=0.8),
        outlets=(output,),
    )
    pod.started = True

    async def scrape() -> bytes | None:
        return None

    port = ControlPort(pod, Verifier("pod", "fleetkeeper"), scrape)
    runner = await serve_control(port, "127.0.0.1", unused_tcp_port)
    reaper = Reaper(output)
    reaper.start()
    try:
        async with asyncio.timeout(GUARD_S), aiohttp.ClientSession() as session:
            child = await reaper.spawn([sys.executable, "-c", WORDY], {})
            assert await child.ended == 0
            assert child.tee is not None
            await child.tee
            assert child.lines[-1] == "the end", "kept for the diagnosis, whoever reads the log"
            url = f"http://127.0.0.1:{unused_tcp_port}"
            async with session.get(f"{url}/healthz/live") as answer:
                assert answer.status == 200
            async with session.get(f"{url}/metrics") as answer:
                text = await answer.text()
    finally:
        reaper.stop()
        await runner.cleanup()
    assert output.dropped >= 4 * MAX_BYTES - MAX_BYTES - 2 * 65_536
    (told,) = re.findall(r"^fleetkeeper_log_dropped_bytes_total (.+)$", text, re.MULTILINE)
    assert float(told) == output.dropped


@pytest.mark.exhaustive
async def test_a_log_record_never_waits_for_its_reader(pipe: tuple[int, int]) -> None:
    """Logging from the event loop, and the end of the process, take a full pipe as they find it."""
    logger, log = logging.getLogger("fleetkeeper.test"), Outlet(pipe[1], max_bytes=100_000)
    handler = logging.StreamHandler(sys.stderr)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with logging_through(log):
            for _ in range(400):
                logger.warning("w" * 1000)
        assert handler.stream is sys.stderr
    finally:
        root.removeHandler(handler)
    assert log.dropped > 100_000


def test_a_reader_that_comes_back_gets_the_rest_and_how_much_is_missing(
    pipe: tuple[int, int],
) -> None:
    """Whole writes are dropped, never the middle of one."""
    reading, writing = pipe
    outlet = Outlet(writing, max_bytes=300_000)
    lines = [b"%06d %b\n" % (number, b"x" * 992) for number in range(1000)]
    for line in lines:
        outlet.write(line)
    dropped = outlet.dropped
    assert dropped > 0
    found = b""
    while len(found) < 1000 * len(lines) - dropped:
        found += os.read(reading, 65_536)
    outlet.write(b"again\n")
    while not found.endswith(b"again\n"):
        found += os.read(reading, 65_536)
    outlet.flush()
    # A busy machine may let the outlet write between two gaps; each gap has its note.
    notes = re.compile(rb"\[fleetkeeper: (\d+) bytes [^\n]*dropped[^\n]*\]\n")
    assert sum(map(int, notes.findall(found))) == dropped
    kept = notes.sub(b"", found).removesuffix(b"again\n").splitlines(keepends=True)
    assert kept == sorted(set(kept) & set(lines))
    assert 1000 * (len(lines) - len(kept)) == dropped


def test_all_that_was_written_is_there_at_the_end(pipe: tuple[int, int]) -> None:
    """With a reader nothing is lost: the last lines say why a pod died."""
    reading, writing = pipe
    outlet = Outlet(writing)
    for number in range(100):
        outlet.write(b"%d\n" % number)
    outlet.flush(GUARD_S)
    assert os.read(reading, 65_536) == b"".join(b"%d\n" % number for number in range(100))
    assert outlet.dropped == 0


def test_without_any_reader_output_is_counted_as_dropped() -> None:
    """A closed pipe is an error of each write, and none of the engine."""
    reading, writing = os.pipe()
    os.close(reading)
    outlet = Outlet(writing)
    outlet.write(b"x" * 1000)
    outlet.flush(GUARD_S)
    assert outlet.dropped == 1000
    os.close(writing)
