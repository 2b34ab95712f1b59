"""Errors of a store, and their messages."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from fleetkeeper_gateway.batch.interfaces import StorageError

FAILURES: Final = (BaseError, OSError, NotImplementedError)
"""Exceptions that obstore and file operations raise."""
REASON_CHARACTERS: Final = 300

_RIGHTS: Final = "check the credentials, and what they may do"
_SPACE: Final = "free some space, or enlarge the volume"
_HINTS: Final[Mapping[int, str]] = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EACCES: "this process must be able to write to the directory",
    errno.EROFS: "the volume must be writable",
    errno.EPERM: "the file system must support hard links",
    errno.ENOTSUP: "the file system must support hard links",
}


class StoreRefused(Exception):
    """The store cannot be used with these settings. The message states the remedy."""


class BrokenObject(StorageError):
    """The content of an object is not valid."""


def is_bucket_missing(error: BaseException) -> bool:
    """Return whether the bucket is missing, and not only the object."""
    text = str(error)
    return "NoSuchBucket" in text or "bucket does not exist" in text


def reason_of(error: BaseException) -> str:
    """Return the reason of a failed call in one line, with the remedy if it is known."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    # The following lines repeat the error in the library's notation.
    text = " ".join(text.partition("\n\nDebug source")[0].split()) or type(error).__name__
    if len(text) > REASON_CHARACTERS:
        text = text[:REASON_CHARACTERS] + "..."
    hint = _hint(error)
    return f"{text}; {hint}" if hint else text


def _hint(error: BaseException) -> str | None:
    if is_bucket_missing(error):
        return "create the bucket, or correct FLEETKEEPER_GATEWAY_BATCH_STORE"
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return _RIGHTS
    return _HINTS.get(error.errno or 0) if isinstance(error, OSError) else None
