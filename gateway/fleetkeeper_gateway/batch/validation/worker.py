"""The validation process: reads a file from standard input, and writes its findings to standard output."""

from __future__ import annotations

import os
import resource
import sys
from typing import BinaryIO, Final

from fleetkeeper_gateway.batch.model import MAX_LINES, Mistake
from fleetkeeper_gateway.batch.validation.checker import BadLine, LineChecker
from fleetkeeper_gateway.batch.validation.findings import Findings, FoundLine
from fleetkeeper_gateway.batch.validation.lines import read_lines

MAX_LINE_BYTES: Final = 16_777_216
"""Maximum bytes of a line: the gateway accepts no larger request (its setting REQUEST_BYTES)."""
_READ_BYTES = 1 << 20
_ADDRESS_SPACE_BYTES: Final = 1 << 30
"""Maximum address space. A line of 16 MiB takes at most 300 MB. Without a bound, a bug could end the whole pod."""
MAX_CPU_S: Final = 300
"""Maximum CPU time. The slowest known file, 200 MiB of empty objects, takes 25 s."""
_NICE = 5
"""Niceness: requests have priority over the validation of a file."""


def check_file(
    file: BinaryIO,
    endpoint: str,
    *,
    max_lines: int = MAX_LINES,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Findings:
    """Check a file, and return its findings. Memory is bounded by one line and the findings.

    Args:
        file: read once, to its end or to the first line beyond `max_lines`.
        endpoint: the url of every line.
        max_lines: maximum number of lines that are not empty.
        max_line_bytes: maximum bytes of a line.
    """
    findings, checker = Findings(), LineChecker(endpoint)
    for number, offset, text in read_lines(file, max_line_bytes):
        if findings.lines == max_lines:
            findings.read_all = False
            findings.add_mistake_of_file(
                Mistake(
                    "too_many_lines",
                    f"The file has more than {max_lines} lines. Split it into several batches.",
                )
            )
            break
        findings.lines += 1
        if text is None:
            findings.add_mistake(
                Mistake("line_too_long", f"The line has more than {max_line_bytes} bytes.", number)
            )
            continue
        try:
            asked = checker.check(number, text)
        except BadLine as bad:
            findings.add_mistake(Mistake(bad.code, str(bad), number, bad.param))
        else:
            findings.add_line(FoundLine(offset, len(text), asked))
    if not findings.lines:
        findings.add_mistake_of_file(Mistake("empty_file", "The file has no lines."))
    findings.model = checker.model
    return findings


def main(endpoint: str, max_cpu_s: int = MAX_CPU_S) -> None:
    """Check standard input. A signal ends the process when it exceeds its CPU time."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, resource.RLIM_INFINITY))
    # That signal would write a core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    with open(0, "rb", buffering=_READ_BYTES) as file:
        findings = check_file(file, endpoint)
    for part in findings.encode():
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
