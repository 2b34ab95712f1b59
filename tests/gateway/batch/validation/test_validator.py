"""The process that reads a file: fed, bounded, killed and replaced."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.model import BatchRecord, FileRecord
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import create_storage
from fleetkeeper_gateway.batch.validation import validator as validation
from fleetkeeper_gateway.batch.validation.checker import LineChecker
from fleetkeeper_gateway.batch.validation.validator import ATTEMPTS, Validator
from fleetkeeper_gateway.limits import estimate_tokens
from tests.support.batch.batch_api import CHAT, jsonl, line, until
from tests.support.batch.batch_memory import MemoryFiles, MemoryObjects
from tests.support.batch.batch_storage import NOW, Clock, a_batch, a_file, parts_of
from tests.support.guards import GUARD_S
from tests.support.lanes import keep_first
from tests.support.processor_units import LONGEST, longest_turn

ESTIMATE = functools.partial(estimate_tokens, cap=1000)
RECORD = BatchRecord("batch_1", "one", "file-1", CHAT, "24h", 1000, 2000)
MIB = 1 << 20


class World:
    """An input file in a store, and what validates it."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.files = MemoryFiles(self.objects)
        self._others = set(psutil.Process().children())

    def children(self) -> list[psutil.Process]:
        """Return the processes that run and that this test started."""
        return [
            child
            for child in psutil.Process().children()
            if child not in self._others
            and child.is_running()
            and child.status() != psutil.STATUS_ZOMBIE
        ]

    async def put(self, data: bytes) -> None:
        record = FileRecord("file-1", "one", "in.jsonl", "batch", len(data), 1000)
        await self.files.add(record, data)

    def validator(self, command: Sequence[str] | None = None) -> Validator:
        if command is None:
            return Validator(self.objects, self.files, ESTIMATE, clock=lambda: 1234.5)
        return Validator(
            self.objects, self.files, ESTIMATE, command=lambda *_: command, clock=lambda: 1234.5
        )


@pytest.fixture
def world() -> World:
    return World()


def nested(depth: int) -> bytes:
    """Return a line with arrays in one another."""
    return jsonl([line(1)]).replace(b'"question 1"', b"[" * depth + b"]" * depth)


@pytest.mark.parametrize(("depth", "codes"), [(61, []), (62, ["too_deep"])])
async def test_the_body_of_a_line_may_be_as_deep_as_a_body_that_the_gateway_takes(
    world: World, depth: int, codes: list[str]
) -> None:
    """64 levels: with the list of messages, the message, and the body itself."""
    await world.put(nested(depth))
    validated, lines = await world.validator().validate(RECORD)
    assert [mistake.code for mistake in validated.mistakes] == codes
    assert len(lines) == 1 - len(codes)


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


async def test_a_valid_file_has_a_model_tokens_and_lines(world: World) -> None:
    lines = [
        line(number, body={"model": "m", "max_tokens": 10 * number, "n": 2})
        for number in range(1200)
    ]
    data = b"\xef\xbb\xbf\n" + jsonl(lines).replace(b"\n", b"\r\n")
    await world.put(data)
    world.objects.piece_bytes = 1000
    validated, refs = await world.validator().validate(RECORD)
    assert (validated.lines, validated.model, validated.at, validated.mistakes) == (
        1200,
        "m",
        1234,
        (),
    )
    assert [ref.number for ref in refs] == list(range(1200))
    texts = data[3:].replace(b"\r", b"").split(b"\n")[1:-1]
    assert [data[ref.offset :][: ref.length] for ref in refs] == texts
    answers = sum(2 * min(10 * number, 1000) for number in range(1200))
    prompts = sum(map(len, texts)) / 4
    assert answers < validated.tokens < answers + prompts


async def test_mistakes_are_returned_without_lines(world: World) -> None:
    await world.put(b"x\n" + jsonl([line(1), line(1)]))
    validated, refs = await world.validator().validate(RECORD)
    assert (validated.lines, validated.model, validated.tokens, refs) == (3, "", 0, ())
    assert [(one.line, one.code) for one in validated.mistakes] == [
        (1, "invalid_json_line"),
        (3, "duplicate_custom_id"),
    ]


async def test_a_file_that_is_gone_is_a_mistake(world: World) -> None:
    validated, refs = await world.validator().validate(RECORD)
    assert ([one.code for one in validated.mistakes], refs) == (["file_not_found"], ())
    await world.put(jsonl([line(1)]))
    world.objects.kept.clear()
    validated, _ = await world.validator().validate(RECORD)
    assert [one.code for one in validated.mistakes] == ["file_not_found"]


async def test_a_file_that_expired_after_its_batch_was_created_is_read(tmp_path: Path) -> None:
    """Its bytes stay until the batch has ended."""
    now = Clock()
    storage = create_storage(BatchSettings(batch_store=f"file://{tmp_path}/store"), wall=now)
    file, batch = a_file(expires=NOW + 1), a_batch()
    await storage.objects.write(
        storage.files.data_path(file.key_id, file.id), parts_of(data := jsonl([line(1)]))
    )
    await storage.files.put(replace(file, bytes=len(data)))
    await storage.batches.create(batch)
    now.now += 2
    assert await storage.files.get(file.key_id, file.id) is None
    validator = Validator(storage.objects, storage.files, ESTIMATE)
    validated, refs = await validator.validate(batch)
    assert (validated.mistakes, len(refs)) == ((), 1)
    # One that was deleted is gone, also if it was read.
    await storage.files.remove(file)
    validated, _ = await validator.validate(batch)
    assert [one.code for one in validated.mistakes] == ["file_not_found"]
    storage.close()


async def test_too_many_lines_end_the_reading_early(world: World) -> None:
    await world.put(b"x\n" * 3_000_000)
    validated, _ = await world.validator().validate(RECORD)
    assert validated.mistakes[0].code == "too_many_lines"
    assert validated.lines == 50_000


@pytest.mark.exhaustive
async def test_the_largest_lines_fit_into_the_memory_of_the_process(world: World) -> None:
    """The process has a bound of its own, above which it dies: no line may come near it."""
    start = jsonl([line(1)])[:-3] + b', "x": '
    room = 16 * MIB - len(start) - 100
    hostile = [
        b'"' + b"x" * room + b'"',
        b'"' + "😀".encode() * (room // 4) + b'"',
        b"[" + b"99999," * (room // 6) + b"1]",
        b"[" + b"1e9," * (room // 4) + b"1]",
        b"[" + b"{}," * (room // 3) + b"1]",
        b"[" + b'{"a":[]},' * (room // 9) + b"1]",
        b'"' + b"\\u0061" * (room // 6) + b'"',
        b"[" + b'"a",' * (room // 4) + b"1]",
    ]
    await world.put(b"".join(start + values + b"}}\n" for values in hostile))
    world.objects.piece_bytes = 4 * MIB
    validated, _ = await world.validator().validate(RECORD)
    assert validated.lines == len(hostile)
    assert {one.code for one in validated.mistakes} == {"duplicate_custom_id", "too_many_values"}


@pytest.mark.promise("batch-bounds")
async def test_another_process_does_the_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked_here(*_: object) -> None:
        raise AssertionError("a line was checked in this process")

    monkeypatch.setattr(LineChecker, "__init__", checked_here)
    await world.put(jsonl([line(number) for number in range(100)]))
    validated, _ = await world.validator().validate(RECORD)
    assert validated.lines == 100


async def test_a_process_that_dies_is_replaced(world: World, tmp_path: Path) -> None:
    await world.put(jsonl([line(1)]))
    code = (
        "import os, pathlib, sys\n"
        "ran = pathlib.Path(sys.argv[1])\n"
        "if not ran.exists():\n"
        "    ran.touch()\n"
        "    os.kill(os.getpid(), 9)\n"
        "from fleetkeeper_gateway.batch.validation.worker import main\n"
        "main(sys.argv[2])\n"
    )
    command = python(code, str(tmp_path / "ran"), CHAT)
    validated, refs = await world.validator(command).validate(RECORD)
    assert (validated.lines, validated.mistakes, len(refs)) == (1, (), 1)


@pytest.mark.parametrize(
    "code",
    keep_first(
        1,
        [
            "import os; os.kill(os.getpid(), 9)",
            "raise SystemExit(3)",
            "import sys; sys.stdin.buffer.read(); print('{}')",
            "import sys; sys.stdin.buffer.read()",
            "import sys; sys.stdin.buffer.read(); print('[1]')",
        ],
        pytest.mark.exhaustive,
    ),
    ids=["killed", "failed", "no findings", "silent", "other JSON"],
)
async def test_processes_that_all_die_fail_the_batch(
    world: World, tmp_path: Path, code: str
) -> None:
    await world.put(b"x" * 3_000_000)
    count = tmp_path / "count"
    counted = f"open({str(count)!r}, 'a').write('x')\n{code}"
    validated, refs = await world.validator(python(counted)).validate(RECORD)
    assert ([one.code for one in validated.mistakes], refs) == (["validation_failed"], ())
    assert count.read_text() == "x" * ATTEMPTS
    assert world.children() == []


async def test_processes_that_end_while_the_store_is_slow_fail_the_batch(world: World) -> None:
    """The pipe to such a process is closed already when the next part of the file comes."""
    await world.put(b"")

    async def parts(_path: str) -> AsyncIterator[bytes]:
        yield b"x"
        await until(lambda: world.children() == [])
        for _ in range(3):  # turns in which the loop closes the pipe
            await asyncio.sleep(0)
        yield b"x"

    world.objects.stream = parts  # type: ignore[assignment, method-assign]
    validated, _ = await world.validator(python("raise SystemExit(3)")).validate(RECORD)
    assert [one.code for one in validated.mistakes] == ["validation_failed"]


async def test_a_command_that_does_not_exist_fails_the_batch(world: World) -> None:
    await world.put(b"x")
    validated, _ = await world.validator(("/nowhere/python",)).validate(RECORD)
    assert [one.code for one in validated.mistakes] == ["validation_failed"]


async def test_a_store_that_fails_ends_the_process_and_the_file_is_read_again(
    world: World,
) -> None:
    await world.put(jsonl([line(number) for number in range(10_000)]))
    validator = world.validator()
    world.objects.fail_streams_after = 3
    with pytest.raises(StorageError):
        await validator.validate(RECORD)
    assert world.children() == []
    world.objects.fail_streams_after = None
    validated, _ = await validator.validate(RECORD)
    assert (validated.lines, validated.mistakes) == (10_000, ())


async def test_a_file_with_fewer_bytes_than_it_had_is_no_valid_file(world: World) -> None:
    data = jsonl([line(number) for number in range(10)])
    await world.put(data)
    path = world.files.data_path("one", "file-1")
    world.objects.kept[path] = data[: data.rindex(b"\n", 0, -1) + 1]
    with pytest.raises(StorageError, match="bytes"):
        await world.validator().validate(RECORD)


async def test_a_cancelled_validation_kills_its_process(world: World) -> None:
    await world.put(b"x" * 3_000_000)
    hangs = python("import signal; signal.pause()")
    validating = asyncio.create_task(world.validator(hangs).validate(RECORD))
    await until(world.children)
    validating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await validating
    assert world.children() == []


async def test_a_validation_that_is_cancelled_while_its_process_starts_leaves_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, gate = asyncio.create_subprocess_exec, asyncio.Event()

    async def slowly(*command: str, **options: Any) -> asyncio.subprocess.Process:
        process = await create(*command, **options)
        await gate.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    await world.put(b"x" * 3_000_000)
    hangs = python("import signal; signal.pause()")
    validating = asyncio.create_task(world.validator(hangs).validate(RECORD))
    await until(world.children)
    validating.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await validating
    assert world.children() == []


async def test_a_process_that_does_not_read_stops_the_store(world: World) -> None:
    taken = 0

    async def endless(path: str) -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += MIB
            yield b"x" * MIB
            await asyncio.sleep(0)

    await world.put(b"x")
    world.objects.stream = endless  # type: ignore[method-assign]
    hangs = python("import signal; signal.pause()")
    validating = asyncio.create_task(world.validator(hangs).validate(RECORD))
    await until(lambda: taken)
    done, _ = await asyncio.wait([validating], timeout=0.5)
    assert not done
    assert taken <= 4 * MIB
    validating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await validating


@pytest.mark.parametrize("bad", [b"", b"x\n"], ids=["valid", "mistakes"])
async def test_a_file_is_read_once_for_all_batches_with_an_endpoint(
    world: World, bad: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "KEPT", 2)
    await world.put(jsonl([line(number) for number in range(1200)]) + bad)
    validator = world.validator()
    first = await validator.validate(RECORD)
    again = await validator.validate(replace(RECORD, id="batch_2"))
    assert again == first
    assert world.objects.streams == 1
    other, _ = await validator.validate(replace(RECORD, endpoint="/v1/completions"))
    assert other.mistakes[0].code == "invalid_url"
    # Of three, the one that was used before the others is forgotten.
    await validator.validate(RECORD)
    await validator.validate(replace(RECORD, endpoint="/v1/embeddings"))
    await validator.validate(RECORD)
    assert world.objects.streams == 3
    await validator.validate(replace(RECORD, endpoint="/v1/completions"))
    assert world.objects.streams == 4
    # A file that is deleted is gone, also if it was read.
    world.files.kept.clear()
    gone, _ = await validator.validate(RECORD)
    assert [one.code for one in gone.mistakes] == ["file_not_found"]


@pytest.mark.slow
async def test_what_was_found_in_the_largest_file_leaves_the_event_loop_to_others(
    world: World, tmp_path: Path
) -> None:
    """The process answers at once: what is measured is the reading of its answer, and its keeping."""
    await world.put(b"x")
    code = (
        "import sys\n"
        "from fleetkeeper_contract.bodies.asked import Asked\n"
        "from fleetkeeper_gateway.batch.validation.findings import Findings, FoundLine\n"
        "findings = Findings(lines=50_000, model='m')\n"
        "for number in range(50_000):\n"
        "    findings.add_line(FoundLine(number, 1, Asked(100, 7, 1)))\n"
        "sys.stdin.buffer.read()\n"
        "for part in findings.encode():\n"
        "    sys.stdout.buffer.write(part)\n"
    )

    with closing(create_storage(BatchSettings(batch_store=f"file://{tmp_path}/store"))) as storage:

        async def validate() -> None:
            validated, refs = await world.validator(python(code)).validate(RECORD)
            assert len(refs) == validated.lines == 50_000
            record = replace(RECORD, id=f"batch_{uuid.uuid4().hex}")
            await storage.batches.put_validated(record, validated, refs)

        assert await longest_turn(validate) < LONGEST


async def test_a_file_that_takes_too_long_fails_its_batches_at_once(
    world: World, tmp_path: Path
) -> None:
    """The bound is one of the processor's time, so a busy machine fails no file."""
    await world.put(b"x\n")
    count = tmp_path / "count"
    code = (
        f"open({str(count)!r}, 'a').write('x')\n"
        "from fleetkeeper_gateway.batch.validation import worker\n"
        "def spin(*_, **__):\n"
        "    while True:\n"
        "        pass\n"
        "worker.check_file = spin\n"
        "worker.main('/v1/embeddings', 1)\n"
    )
    validator = world.validator(python(code))
    for _ in range(2):
        validated, refs = await validator.validate(RECORD)
        assert ([one.code for one in validated.mistakes], refs) == (["validation_too_slow"], ())
    assert count.read_text() == "x"


async def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """A killed process leaves no other behind: the reader sees the end of its input."""
    code = (
        "import subprocess, sys\n"
        "from fleetkeeper_gateway.batch.validation.pipe import worker_command\n"
        "child = subprocess.Popen(worker_command('/v1/embeddings'),\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = await asyncio.create_subprocess_exec(*python(code), stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    async with asyncio.timeout(GUARD_S):
        reader = psutil.Process(int(await parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        await parent.wait()
    await until(lambda: not reader.is_running() or reader.status() == psutil.STATUS_ZOMBIE)
