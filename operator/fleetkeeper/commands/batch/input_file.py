"""The check of an input file before it is uploaded: the rules of the server that need no server.

A mistake that is found here costs a second, and one that the server finds the time of an upload.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MAX_LINES: Final = 50_000
MAX_BYTES: Final = 209_715_200
MAX_LINE_BYTES: Final = 16_777_216
MAX_ID: Final = 512
MAX_MODEL: Final = 256
BOM: Final = b"\xef\xbb\xbf"
SHOWN: Final = 20
"""Maximum mistakes that are printed one by one."""


class UnreadableInput(Exception):
    """A file that cannot be read. The message names it."""


class _Mistake(Exception):
    """A mistake in a line."""


@dataclass(slots=True)
class Checked:
    """The result of checking a file."""

    lines: int = 0
    """Lines that are not empty."""
    bytes: int = 0
    model: str = ""
    mistakes: list[str] = field(default_factory=list)
    """The first ones, each with its line."""
    wrong: int = 0
    """Number of all mistakes."""
    ids: dict[str, int] = field(default_factory=dict)
    """Line of each custom_id."""

    def add(self, mistake: str) -> None:
        """Count a mistake, and keep it if it is one of the first."""
        self.wrong += 1
        if len(self.mistakes) < SHOWN:
            self.mistakes.append(mistake)


def check_file(path: Path, endpoint: str) -> Checked:
    """Return what a file is, with its mistakes.

    Args:
        path: the file.
        endpoint: path that every line must name.

    Raises:
        UnreadableInput: if it cannot be read.
    """
    try:
        found = Checked(bytes=path.stat().st_size)
        if found.bytes > MAX_BYTES:
            found.add(f"{path}: {found.bytes} bytes; a file has at most {MAX_BYTES}: split it")
            return found
        with path.open("rb") as file:
            for number, line in _lines(file):
                found.lines += 1
                try:
                    _check_line(line, number, endpoint, found)
                except _Mistake as mistake:
                    found.add(f"{path}:{number}: {mistake}")
    except OSError as problem:
        raise UnreadableInput(f"cannot read {path}: {problem.strerror or problem}") from problem
    if found.lines > MAX_LINES:
        found.add(f"{path}: {found.lines} lines; a file has at most {MAX_LINES}: split it")
    if not found.lines:
        found.add(f"{path}: no line; write one JSON object a line")
    return found


def _lines(file: Any) -> Iterator[tuple[int, bytes]]:  # noqa: ANN401 - a binary file
    """Yield the lines that are not empty with their numbers, from 1."""
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(BOM) if number == 1 else line
        text = text.removesuffix(b"\n").removesuffix(b"\r")
        if text.strip(b" \t\r"):
            yield number, text


def _check_line(line: bytes, number: int, endpoint: str, found: Checked) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise _Mistake(f"has more than {MAX_LINE_BYTES} bytes")
    try:
        request = json.loads(line.decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except UnicodeDecodeError as problem:
        raise _Mistake(f"is not UTF-8 at byte {problem.start}") from problem
    except RecursionError as problem:
        raise _Mistake("is nested too deeply") from problem
    except json.JSONDecodeError as problem:
        raise _Mistake(f"is not JSON: {problem}") from problem
    except ValueError as problem:  # Python bounds the digits of a number
        raise _Mistake("has a number with too many digits") from problem
    if not isinstance(request, dict):
        raise _Mistake("is not a JSON object")
    _check_id(request.get("custom_id"), number, found)
    if request.get("method") != "POST":
        raise _Mistake(f'method is {request.get("method")!r}; it must be "POST"')
    if request.get("url") != endpoint:
        raise _Mistake(f"url is {request.get('url')!r}; all lines must name {endpoint!r}")
    body = request.get("body")
    if not isinstance(body, dict):
        raise _Mistake("body is not an object")
    _check_body(body, found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Mistake("has a name twice in one object, so two readers could disagree")
    return found


def _no_number(name: str) -> None:
    raise _Mistake(f"is not JSON: it has {name}")


def _check_id(custom_id: object, number: int, found: Checked) -> None:
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID:
        raise _Mistake(f"custom_id must be a text of 1 to {MAX_ID} characters")
    _check_text(custom_id, "custom_id")
    first = found.ids.setdefault(custom_id, number)
    if first != number:
        raise _Mistake(f"custom_id {custom_id!r} is that of line {first} too")


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise _Mistake(f"{name} has half of a surrogate pair, which is no text") from problem


def _check_body(body: dict[str, Any], found: Checked) -> None:
    model = body.get("model")
    if not isinstance(model, str) or not 1 <= len(model) <= MAX_MODEL:
        raise _Mistake(f"body.model must be a text of 1 to {MAX_MODEL} characters")
    _check_text(model, "body.model")
    found.model = found.model or model
    if model != found.model:
        raise _Mistake(
            f"body.model is {model!r}; all lines must name {found.model!r}, as the first"
        )
    stream = body.get("stream")
    if stream is not None and stream is not False:
        raise _Mistake("body.stream is set; a line has one answer: leave it out")
