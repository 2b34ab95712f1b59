"""What the supervisor gives back after the start: pages of files that were never written, and no others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fleetkeeper_engine.supervisor.memory.trim import Span, unwritten_spans

SMAPS = """\
00400000-00401000 r-xp 00000000 08:01 11                                 /usr/bin/python3.11
Size:                  4 kB
Anonymous:             0 kB
7f0000000000-7f0000002000 r--p 00000000 08:01 12                         /usr/lib/relocated.so
Size:                  8 kB
Anonymous:             4 kB
7f0000002000-7f0000005000 r-xp 00002000 08:01 12                         /usr/lib/with a space.so
Anonymous:             0 kB
7f0000005000-7f0000006000 rw-s 00000000 00:17 13                         /dev/shm/fleetkeeper/page
Anonymous:             0 kB
7f0000006000-7f0000007000 rw-p 00004000 08:01 12                         /usr/lib/data.so
Anonymous:             0 kB
7f0000007000-7f0000009000 r--p 00000000 00:00 0
Anonymous:             0 kB
7ffc00000000-7ffc00002000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
""".splitlines()


def test_only_unwritten_pages_of_files_are_given_back() -> None:
    """Heap, stack, data, shared memory and linked-up pages hold what no file holds."""
    assert list(unwritten_spans(SMAPS)) == [
        Span(0x400000, 0x1000),
        Span(0x7F0000002000, 0x3000),
    ]


@pytest.mark.slow
def test_a_process_goes_on_as_before_and_is_smaller() -> None:
    """The pages of its libraries come back from the page cache as they are used."""
    program = """
import asyncio, json, ssl
import aiohttp.web, cryptography.hazmat.primitives.asymmetric.ed25519 as ed25519, pydantic
from fleetkeeper_engine.supervisor.memory.trim import trim_memory
def file_kb():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssFile'))
key = ed25519.Ed25519PrivateKey.generate()
before = file_kb()
for _ in range(3):
    trim_memory()
after = file_kb()
key.public_key().verify(key.sign(b'a'), b'a')
asyncio.run(asyncio.sleep(0))
class Model(pydantic.BaseModel):
    a: int
assert Model.model_validate_json('{"a": 1}').a == 1
ssl.create_default_context()
print(json.dumps([before, after]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    before, after = (int(part) for part in done.stdout.strip("[] \n").split(","))
    assert after < before / 2
