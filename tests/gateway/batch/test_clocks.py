"""The wall clock of a batch process steps: no line is lost or has two results."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.batch.batch_process import (
    BatchProcess,
    BatchSurroundings,
    batch_surroundings,
    ended,
    line,
    lines_of,
    numbers,
    submit,
    until_engine,
)

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
STEPS = Path(__file__).parents[2] / "support" / "clock_steps"
HOUR_S = 3600.0


@dataclass
class Stepped:
    """A batch process whose clock steps. Its upstream is the engine, which asks for no token with a time."""

    world: BatchSurroundings
    process: BatchProcess
    file: Path

    def ahead(self, seconds: float) -> None:
        """Set how far its clock is ahead."""
        with self.file.open("r+b") as file:
            file.write(struct.pack("<d", seconds))


@pytest.fixture
async def stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stepped]:
    (tmp_path / "key").write_text("sk-upstream")
    (tmp_path / "step").write_bytes(struct.pack("<d", 0.0))
    async with batch_surroundings(tmp_path) as world:
        monkeypatch.setenv("CLOCK_STEP", str(tmp_path / "step"))
        monkeypatch.setenv("PYTHONPATH", str(STEPS))
        process = world.batch(
            BATCH_CONCURRENCY="8",
            BATCH_END_SECONDS="1",
            BATCH_UPSTREAM=f"http://127.0.0.1:{world.engine.port}",
            BATCH_UPSTREAM_KEY_FILE=str(tmp_path / "key"),
        )
        await process.start().ready()
        yield Stepped(world, process, tmp_path / "step")
        assert process.tracebacks() == []


async def test_lines_run_through_steps_of_the_clock(stepped: Stepped) -> None:
    async with stepped.process.client(stepped.world.keys["client"]) as client:
        batch_id = await submit(client, [line(number, seconds=0.2) for number in range(200)])
        for answered, hours in ((10, 6.0), (60, -6.0), (110, 20.0), (160, 0.0)):
            await until_engine(stepped.world.engine, "answered", answered)
            stepped.ahead(hours * HOUR_S)
        batch = await ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 200)
        assert numbers(await lines_of(client, batch.output_file_id)) == list(range(200))


async def test_a_step_past_the_window_ends_the_batch_once(stepped: Stepped) -> None:
    async with stepped.process.client(stepped.world.keys["client"]) as client:
        # Worker processes hear of the end within 10 s, and lines that run have their time.
        lines = [line(number, seconds=0.2) for number in range(2000)]
        batch_id = await submit(client, lines, window="5m")
        await until_engine(stepped.world.engine, "answered", 10)
        stepped.ahead(HOUR_S)
        batch = await ended(client, batch_id)
        assert batch.status == "expired"
        stepped.ahead(0.0)
        output = await lines_of(client, batch.output_file_id)
        errors = await lines_of(client, batch.error_file_id)
        assert len(output) >= 10
        assert sorted(numbers(output + errors)) == list(range(2000))
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}
        later = await ended(client, await submit(client, lines[:10]))
        assert (later.status, later.request_counts.completed) == ("completed", 10)
        assert await client.batches.retrieve(batch_id) == batch
