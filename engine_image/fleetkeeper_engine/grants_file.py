"""grants.json: whether an engine demands grants, for which service, and whose signatures count. Pure.

The operator writes it beside the control keys. A changed ConfigMap brings it into the running pod.
Both pid 1 and the middleware read it, so it needs no library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fleetkeeper_contract.grants import MAX_GRANT_KEYS

_PUBLIC = re.compile(r"[A-Za-z0-9_-]{43}")
"""32 bytes in base64url, the public half of an Ed25519 key."""


@dataclass(frozen=True, slots=True)
class GrantsFile:
    """The content of the file."""

    demanded: bool = False
    service: str = ""
    """UID of the InferenceService."""
    keys: Mapping[str, str] | None = None
    """Public keys in base64url, by kid."""


NO_GRANTS = GrantsFile()
"""Without a file nothing is demanded."""


def parse_grants(text: str) -> GrantsFile:
    """Return the content of the file. Fields that this engine does not know are ignored.

    Raises:
        ValueError: if a known field is wrong, with its name.
    """
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("expected a JSON object")  # noqa: TRY004
    demanded, service, listed = (document.get(name) for name in ("demanded", "service", "keys"))
    if not isinstance(demanded, bool):
        raise ValueError("demanded must be true or false")  # noqa: TRY004
    if not isinstance(service, str) or not service:
        raise ValueError("service must be the UID of the InferenceService")
    if not isinstance(listed, list) or len(listed) > MAX_GRANT_KEYS:
        raise ValueError(f"keys must be a list of at most {MAX_GRANT_KEYS} public keys")
    keys = dict(map(_key, listed))
    if len(keys) < len(listed):
        raise ValueError("each of the keys needs a kid of its own")
    return GrantsFile(demanded, service, keys)


def _key(entry: object) -> tuple[str, str]:
    found = entry if isinstance(entry, dict) else {}
    if found.get("kty") != "OKP" or found.get("crv") != "Ed25519":
        raise ValueError("only Ed25519 keys (kty OKP) are accepted in keys")
    if "d" in found:
        raise ValueError("keys contains a private key; replace the key at once")
    kid, public = found.get("kid"), found.get("x")
    if not isinstance(kid, str) or not kid:
        raise ValueError("each of the keys needs a kid of its own")
    if not isinstance(public, str) or _PUBLIC.fullmatch(public) is None:
        raise ValueError(f"key {kid!r} has no public key of 32 bytes in x")
    return kid, public
