"""The Lua scripts: our own, and within them those of the library `limits` for requests.

`limits` would call Redis once to count a request and once to read its window, and ours would be a third
call. Its scripts run as functions within our scripts instead: a request needs one round trip, and either
all limits admit it or none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from limits.aio.storage.redis.bridge import RedisBridge

_WINDOW = """
local function acquire_request(KEYS, ARGV)
{acquire}
end
local function request_window(KEYS, ARGV)
{window}
end
"""


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and the digest by which a server identifies it."""

    text: bytes
    digest: bytes


def _script(name: str, *, windows: bool = False) -> Script:
    folder = files(__package__) / "lua"
    parts = [(folder / "common.lua").read_text()]
    if windows:
        parts.append(
            _WINDOW.format(
                acquire=RedisBridge.SCRIPT_ACQUIRE_SLIDING_WINDOW.decode(),
                window=RedisBridge.SCRIPT_SLIDING_WINDOW.decode(),
            )
        )
    parts.append((folder / f"{name}.lua").read_text())
    text = "\n".join(parts).encode()
    digest = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    return Script(text, digest.encode())


ADMIT = _script("admit", windows=True)
RELEASE = _script("release")
SETTLE = _script("settle")
RENEW = _script("renew")
SCRIPTS = (ADMIT, RELEASE, SETTLE, RENEW)
