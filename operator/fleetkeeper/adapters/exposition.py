"""Parser of the metrics that an engine exposes: the series of the contract, and nothing else.

The text is untrusted. Known lines are selected while the bytes arrive, so memory use stays bounded
for any input, and the slow parser sees only those lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import PodSample, Source
from fleetkeeper.autoscale.signals.series_map import PREFIX, SERIES, sample_of

LINES: Final = 2_000
"""The contract has about 650 series. A pod with three times as many lines of our prefix is not read."""
LINE_BYTES: Final = 1_024
"""A line of the contract takes about 100 bytes."""
_MARK: Final = b"\n" + PREFIX.encode()
_NAMES: Final = frozenset(name.encode() for name in SERIES)


class UnusableText(ValueError):
    """Text that is larger than any engine's; the message says in what."""


class ContractLines:
    """The lines of known series, collected from chunks of text.

    `find` searches at memory speed, and a chunk is cut at its last line end, so megabytes of other
    text cost milliseconds.
    """

    def __init__(self) -> None:
        self._rest = b"\n"
        self._lines: list[bytes] = []
        self._count = 0

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes.

        Raises:
            UnusableText: there are too many lines of our prefix, or one is too long.
        """
        text = self._rest + chunk
        end = text.rfind(b"\n")
        self._collect(text, end)
        rest = text[end:]
        if len(rest) > LINE_BYTES:
            if _name(rest[1:]) in _NAMES:
                raise UnusableText(f"a line is longer than {LINE_BYTES} bytes")
            # The rest of this line is not one of our lines, because the mark starts with a line end.
            rest = b"-"
        self._rest = rest

    def text(self) -> str:
        """Return the collected lines, including a last one without a line end.

        Raises:
            UnusableText: there are too many of them.
            UnicodeDecodeError: they are not UTF-8.
        """
        self._collect(self._rest + b"\n", len(self._rest))
        self._rest = b"\n"
        return b"".join(self._lines).decode("utf-8")

    def _collect(self, text: bytes, end: int) -> None:
        at = text.find(_MARK, 0, end)
        while at >= 0:
            stop = text.index(b"\n", at + 1)
            line = text[at + 1 : stop + 1]
            self._count += 1
            if self._count > LINES:
                raise UnusableText(f"there are more than {LINES} lines with our metric prefix")
            if _name(line) in _NAMES:
                if len(line) > LINE_BYTES:
                    raise UnusableText(f"a line is longer than {LINE_BYTES} bytes")
                self._lines.append(line)
            at = text.find(_MARK, stop, end)


def _name(line: bytes) -> bytes:
    """Return the name of the series in a line."""
    return line[:LINE_BYTES].split(b"{", 1)[0].split(b" ", 1)[0]


def _series(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for row in family.samples:
            yield row.name, row.labels, float(row.value)


def parse_text(pod: str, now: float, text: str, edges: Edges) -> PodSample | None:
    """Return the sample in the lines of known series; None if there is none.

    Values such as NaN are checked later.
    """
    try:
        series = list(_series(text))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None
    if not series or not math.isfinite(now):
        return None
    return sample_of(pod, now, series, edges, Source.DIRECT)
