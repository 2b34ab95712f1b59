"""The gateway's public keys: a file of a mounted Secret, which changes when the keys rotate."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from fleetkeeper_contract.grants import MAX_GRANT_KEYS

log = structlog.get_logger(__name__)

_PUBLIC: Final = re.compile("[A-Za-z0-9_-]{43}")
CHECK_PERIOD_S: Final = 5.0
"""Interval of reading the mounted Secret; small beside the 1 to 2 minutes of the kubelet."""


class GrantKeysFile:
    """The file, and what it held when it was last valid."""

    def __init__(self, file: Path | None, changed: Callable[[str], None]) -> None:
        self._file = file
        self._changed = changed
        self._text: str | None = None
        self._problem = ""

    async def keep(self) -> None:
        """Pass each new content on; never return. An invalid file leaves the last keys in force."""
        if self._file is None:
            return
        while True:
            self._check(self._file)
            await asyncio.sleep(CHECK_PERIOD_S)

    def _check(self, file: Path) -> None:
        try:
            text = read_grant_keys(file)
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                log.warning("grant keys kept", file=str(file), error=str(error))
            self._problem = str(error)
            return
        self._problem = ""
        if text == self._text:
            return
        is_first, self._text = self._text is None, text
        if not is_first:
            log.info("grant keys changed", kids=[key["kid"] for key in json.loads(text)["keys"]])
        self._changed(text)


def read_grant_keys(file: Path) -> str:
    """Return the public keys in a file as canonical JSON, so that equal keys are equal texts.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a JWKS of public Ed25519 keys.
    """
    document: Any = json.loads(file.read_text(encoding="utf-8"))
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_GRANT_KEYS:
        raise ValueError(f"expected a JWKS of 1 to {MAX_GRANT_KEYS} keys")
    keys = [_public(entry) for entry in listed]
    if len({key["kid"] for key in keys}) < len(keys):
        raise ValueError("each key needs a kid of its own")
    return json.dumps({"keys": keys}, sort_keys=True, separators=(",", ":"))


def _public(entry: Any) -> dict[str, str]:  # noqa: ANN401 - anything that JSON holds
    found = entry if isinstance(entry, dict) else {}
    if "d" in found:
        raise ValueError("the JWKS contains a private key; replace the key at once")
    if found.get("kty") != "OKP" or found.get("crv") != "Ed25519":
        raise ValueError("only Ed25519 keys (kty OKP) are accepted")
    kid, public = found.get("kid"), found.get("x")
    if not isinstance(kid, str) or not kid or not isinstance(public, str) or not public:
        raise ValueError("each key needs kid and x")
    if _PUBLIC.fullmatch(public) is None:
        # Engines refuse a file with such a key, and those that start stay closed.
        raise ValueError(f"key {kid!r} needs 32 bytes in x, as 43 characters of base64url")
    return {"crv": "Ed25519", "kid": kid, "kty": "OKP", "x": public}
