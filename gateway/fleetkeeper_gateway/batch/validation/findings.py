"""The findings of the validation process, and their encoding."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple

from fleetkeeper_contract.bodies.asked import Asked
from fleetkeeper_gateway.batch.model import Mistake

MAX_MISTAKES: Final = 100
_ROW: Final = struct.Struct("<QIIiI")
_ENGINE_DECIDES = -1


class FoundLine(NamedTuple):
    """A valid line."""

    offset: int
    length: int
    asked: Asked


@dataclass(slots=True)
class Findings:
    """The findings of a file."""

    lines: int = 0
    model: str = ""
    mistakes: list[Mistake] = field(default_factory=list)
    """The first mistakes."""
    mistake_count: int = 0
    read_all: bool = True
    """True if the file was read to its end."""
    rows: bytearray = field(default_factory=bytearray)

    def add_line(self, line: FoundLine) -> None:
        """Add a valid line."""
        prompt_bytes, max_tokens, answers = line.asked
        max_tokens = _ENGINE_DECIDES if max_tokens is None else max_tokens
        self.rows += _ROW.pack(line.offset, line.length, prompt_bytes, max_tokens, answers)

    def add_mistake(self, mistake: Mistake) -> None:
        """Add a mistake, or only count it if there are many."""
        self.mistake_count += 1
        if len(self.mistakes) < MAX_MISTAKES:
            self.mistakes.append(mistake)

    def add_mistake_of_file(self, mistake: Mistake) -> None:
        """Add a mistake of the whole file, before those of its lines."""
        self.mistake_count += 1
        self.mistakes.insert(0, mistake)
        del self.mistakes[MAX_MISTAKES:]

    def reported(self) -> tuple[Mistake, ...]:
        """Return at most 100 mistakes. If there are more, the last one states their number."""
        more = self.mistake_count - MAX_MISTAKES
        if more <= 0:
            return tuple(self.mistakes)
        shown = self.mistakes[: MAX_MISTAKES - 1]
        return (*shown, Mistake("more_mistakes", f"{more + 1} more lines have a mistake."))

    def found_lines(self, start: int, end: int) -> Iterator[FoundLine]:
        """Yield some of the lines."""
        rows = memoryview(self.rows)[start * _ROW.size : end * _ROW.size]
        for offset, length, prompt_bytes, max_tokens, answers in _ROW.iter_unpack(rows):
            tokens = None if max_tokens == _ENGINE_DECIDES else max_tokens
            yield FoundLine(offset, length, Asked(prompt_bytes, tokens, answers))

    def encode(self) -> Sequence[bytes | bytearray]:
        """Return the parts of a message: a line of JSON, then a row for each line of the file.

        With mistakes no line will run, so there are no rows.
        """
        rows = bytearray() if self.mistakes else self.rows
        head = {
            "lines": self.lines,
            "model": self.model,
            "mistakes": [asdict(mistake) for mistake in self.mistakes],
            "mistake_count": self.mistake_count,
            "read_all": self.read_all,
            "rows": len(rows) // _ROW.size,
        }
        return json.dumps(head).encode(), b"\n", rows


def decode_findings(message: bytes) -> Findings:
    """Decode the findings of a message.

    Raises:
        ValueError: if the message is not complete.
    """
    text, end, rows = message.partition(b"\n")
    if not end:
        raise ValueError("the message has no end of its first line")
    head = json.loads(text)
    if len(rows) != head.pop("rows") * _ROW.size:
        raise ValueError("the message has another number of lines than it says")
    mistakes = [Mistake(**mistake) for mistake in head.pop("mistakes")]
    return Findings(mistakes=mistakes, rows=bytearray(rows), **head)
