"""Size limits of the API server's responses, and stand-ins for objects beyond them.

The writer of an object decides how large it is, and a decoded response takes up to 30 times the
memory of its JSON. An object that is too large or cannot be decoded is replaced by a stand-in with its
name. The API server writes the metadata of built-in kinds first, starting with the name. The metadata
of custom resources is sorted by field, and ends with the name and the UID.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from fleetkeeper_kube.errors import BrokenAnswer, NotTaken
from fleetkeeper_kube.reading import Live, stand_in

if TYPE_CHECKING:
    import aiohttp

ANSWER_BYTES: Final = 2 * 1024 * 1024
"""Limit of one response and of one line of a watch. etcd accepts objects of up to 1.5 MiB."""
PAGE_BYTES: Final = 1024 * 1024
"""Target size of a page of a list."""
FIRST_PAGE: Final = 20
"""Objects in the first page, whose sizes are unknown."""
LIST_HEAD_BYTES: Final = 16 * 1024
"""List metadata is within this distance of the start or the end. It has a continue token of a few
hundred bytes."""
GROWTH: Final = 4
"""A page has at most this many times the objects of the page before."""
_BUILT_IN: Final = re.compile(
    rb'\{(?:"kind":"\w+","apiVersion":"[\w./]+",)?"metadata":\{"name":"([^"\\]{1,253})",(?:"generateName":"[^"\\]*",)?'
    rb'"namespace":"([^"\\]{1,63})",(?:"selfLink":"[^"\\]*",)?'
    rb'"uid":"([^"\\]{1,64})","resourceVersion":"(\d{1,19})"'
)
_CUSTOM: Final = re.compile(
    rb'"name":"([^"\\]{1,253})","namespace":"([^"\\]{1,63})",'
    rb'(?:"ownerReferences":\[(?:[^\]"]|"(?:[^"\\]|\\.)*")*\],)?'
    rb'"resourceVersion":"(\d{1,19})",(?:"selfLink":"[^"\\]*",)?"uid":"([^"\\]{1,64})"\}'
)
_LABEL_TEXT: Final = rb'"([^"\\]{1,317})":"([^"\\]{0,63})"'
_LABEL: Final = re.compile(_LABEL_TEXT)
_LABELS: Final = re.compile(rb'"labels":\{((?:' + _LABEL_TEXT + rb",?)+)")
_LIST: Final = re.compile(
    rb'"metadata":\{"resourceVersion":"(\d{1,19})"(?:,"continue":"([^"\\]*)")?[^{}]*\},"items":\['
)
_CUSTOM_LIST: Final = re.compile(
    rb'"metadata":\{(?:"continue":"([^"\\]*)",)?(?:"remainingItemCount":\d+,)?'
    rb'"resourceVersion":"(\d{1,19})"(?:,"selfLink":"[^"\\]*")?\}\}\s*$'
)
_ITEMS: Final = re.compile(rb'"items":\[')
_EVENT: Final = re.compile(rb'\{"type":"(ADDED|MODIFIED|DELETED)","object":')


def decoded(content: bytes) -> dict[str, Any]:
    """Return the decoded object of a response.

    Raises:
        BrokenAnswer: it is not JSON, or not an object.
        NotTaken: it is nested too deeply, or contains a number that is too long.
    """
    try:
        value = json.loads(content)
    except json.JSONDecodeError as problem:
        raise BrokenAnswer(f"the response is not JSON: {content[:120]!r}") from problem
    except (RecursionError, ValueError) as problem:
        raise NotTaken("Undecodable", f"cannot be decoded: {problem}", content) from problem
    if not isinstance(value, dict):
        raise BrokenAnswer(f"the response is not an object: {content[:120]!r}")
    return value


async def read_start(content: aiohttp.StreamReader, limit: int) -> bytes:
    """Return at most `limit` bytes of a body; the rest is not read."""
    found = bytearray()
    async for chunk in content.iter_any():
        found += chunk
        if len(found) >= limit:
            break
    return bytes(found[:limit])


async def read_bounded(content: aiohttp.StreamReader) -> bytes:
    """Return a body.

    Raises:
        NotTaken: it is larger than `ANSWER_BYTES`.
    """
    return whole(await read_start(content, ANSWER_BYTES + 1))


async def bounded_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the whole lines of a watch; of a line beyond `ANSWER_BYTES`, its beginning."""
    line = bytearray()
    async for chunk in content.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            _extend(line, end)
            if line:
                yield bytes(line)
            line.clear()
        _extend(line, rest)


def _extend(line: bytearray, more: bytes) -> None:
    """Extend a line up to one byte beyond the limit, which shows that it was cut."""
    line += more[: max(0, ANSWER_BYTES + 1 - len(line))]


def decoded_event(line: bytes) -> dict[str, Any]:
    """Return the event in a line of a watch, with a stand-in for an object that is not read.

    Raises:
        BrokenAnswer: the line is not an event, or does not say which object it is about.
    """
    try:
        return decoded(whole(line))
    except NotTaken as problem:
        event = _EVENT.match(problem.content)
        live = _stand_in_of(problem, event.end()) if event else None
        if event is None or live is None:
            raise BrokenAnswer(f"a watch line {problem.message}: {line[:120]!r}") from problem
        return {"type": event[1].decode(), "object": live}


def whole(content: bytes) -> bytes:
    """Return the content.

    Raises:
        NotTaken: it is larger than `ANSWER_BYTES`.
    """
    if len(content) > ANSWER_BYTES:
        raise NotTaken("TooLarge", f"takes more than {ANSWER_BYTES} bytes as JSON", content)
    return content


def page_of_one(problem: NotTaken) -> dict[str, Any]:
    """Return a page with a stand-in for its only object, which was not read.

    Raises:
        NotTaken: `problem` itself, if its content does not say which object it is.
    """
    metadata = page_metadata(problem)
    first = _ITEMS.search(problem.content, 0, LIST_HEAD_BYTES)
    live = _stand_in_of(problem, first.end()) if first else None
    if metadata is None or live is None:
        raise problem
    return {"metadata": metadata, "items": [live]}


def page_metadata(problem: NotTaken) -> Live | None:
    """Return the metadata of a list that was not read; None if it cannot be found."""
    if found := _LIST.search(problem.content, 0, LIST_HEAD_BYTES):
        version, following = found[1], found[2]
    elif found := _CUSTOM_LIST.search(
        problem.content, max(0, len(problem.content) - LIST_HEAD_BYTES)
    ):
        version, following = found[2], found[1]
    else:
        return None
    return {"resourceVersion": version.decode(), "continue": (following or b"").decode()}


def _stand_in_of(problem: NotTaken, start: int) -> Live | None:
    """Return the stand-in for the object that begins at `start`; None if its metadata is not found.

    The writer of an object can put text into its managedFields that looks like the metadata of
    another object. So metadata of built-in kinds is only read at the beginning. For custom resources
    the last match is used, because the schema allows nothing similar after it.
    """
    if found := _BUILT_IN.match(problem.content, start):
        name, namespace, uid, version = (part.decode(errors="replace") for part in found.groups())
    elif ends := list(_CUSTOM.finditer(problem.content, start)):
        found = ends[-1]
        name, namespace, version, uid = (part.decode(errors="replace") for part in found.groups())
    else:
        return None
    live = stand_in(
        problem.message, name=name, namespace=namespace, uid=uid, resourceVersion=version
    )
    labels = _LABELS.search(problem.content, found.end(), found.end() + LIST_HEAD_BYTES)
    if labels is not None:
        live["metadata"]["labels"] = {
            name.decode(errors="replace"): value.decode(errors="replace")
            for name, value in _LABEL.findall(labels[1])
        }
    return live


def next_limit(limit: int, most: int, items: int, size: int) -> int:
    """Return the number of objects for the next page: as many as fit into `PAGE_BYTES`.

    Example: 20 objects in 400 KiB, at most 200: 51 fit in 1 MiB. 20 in 40 KiB: 80, not 524.
    """
    fitting = PAGE_BYTES * items // size if items and size else most
    return max(1, min(most, fitting, limit * GROWTH))
