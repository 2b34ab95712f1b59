"""The Lua scripts of the queue."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fleetkeeper_gateway.batch.queue.names import PREFIX
from fleetkeeper_gateway.limits.scripts import Script


def _script(*parts: str) -> Script:
    folder = files(__package__) / "lua"
    texts = [f"local PREFIX = '{PREFIX}'"]
    texts += [(folder / f"{part}.lua").read_text() for part in ("common", *parts)]
    text = "\n".join(texts).encode()
    digest = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    return Script(text, digest.encode())


ADD = _script("guard", "add")
TAKE = _script("guard", "take")
RENEW = _script("guard", "renew")
GIVE_BACK = _script("guard", "give_back")
COMMIT = _script("guard", "commit")
COUNTS = _script("guard", "counts")
RECORD = _script("guard", "record")
REMOVE = _script("guard", "remove")
CHECK = _script("guard", "check")
LEAD = _script("guard", "lead")
RESIGN = _script("guard", "resign")

BEGIN = _script("begin")
CLEAR = _script("building", "clear")
RESTORE = _script("building", "restore")
FINISH = _script("building", "finish")
