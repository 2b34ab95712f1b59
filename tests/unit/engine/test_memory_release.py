"""The supervisor releases the memory that only its start needed, and works as before."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, ssl
import aiohttp.web, cryptography.hazmat.primitives.asymmetric.ed25519 as ed25519, pydantic
from fleetkeeper_engine.supervisor.memory.release import release_memory

def file_kb():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssFile'))

key = ed25519.Ed25519PrivateKey.generate()
before = file_kb()
for _ in range(3):
    release_memory()
after = file_kb()
key.public_key().verify(key.sign(b'a'), b'a')
asyncio.run(asyncio.sleep(0))
class Model(pydantic.BaseModel):
    a: int
assert Model.model_validate_json('{"a": 1}').a == 1
ssl.create_default_context()
print(before, after)
"""

HEAP = """
from fleetkeeper_engine.supervisor.memory.release import release_memory

def heap_kb():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))

start = [bytearray(b'x' * 2000) for _ in range(20_000)]
end_of_heap = start.pop()
del start
before = heap_kb()
release_memory()
print(before, heap_kb())
"""


def _run(program: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    before, after = (int(part) for part in done.stdout.split())
    return before, after


@pytest.mark.slow
def test_free_heap_before_its_end_is_returned() -> None:
    """Of 40 MB that are free except for their end."""
    before, after = _run(HEAP)
    assert before - after > 30_000


@pytest.mark.slow
def test_a_process_continues_as_before_and_is_smaller() -> None:
    """The code comes back from the page cache as it runs."""
    before, after = _run(PROGRAM)
    assert before - after > 6_000
    assert after < before * 0.7
