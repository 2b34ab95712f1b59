"""Patterns that the oldest supported Pythons match wrongly stay out.

Python 3.11.0 to 3.11.4 match possessive quantifiers and atomic groups wrongly (gh-106052). Debian 12
has 3.11.2, and later versions hide it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDERS: Final = (
    "operator/fleetkeeper",
    "contract",
    "engine_image",
    "gateway",
    "kube",
    "local",
    "scripts",
)
RAW: Final = re.compile(r"""\b(?:rb?|br)("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")
WRONG: Final = re.compile(r"POSSESSIVE_REPEAT|ATOMIC_GROUP")


def wrong(line: str) -> Iterator[str]:
    """Yield each raw string of a line that has such a group or quantifier."""
    for match in RAW.finditer(line):
        pattern = match.group(1)[1:-1]
        try:
            parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
        except re.error:
            continue  # a raw string that is no pattern
        if WRONG.search(repr(parsed)):
            yield pattern


def test_no_pattern_needs_a_later_python() -> None:
    found = []
    for folder in FOLDERS:
        paths = sorted((ROOT / folder).rglob("*.py"))
        assert paths, f"no module in {folder}"
        for path in paths:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if "+" in line or "(?>" in line:
                    found += [f"{path.relative_to(ROOT)}:{number}: {text}" for text in wrong(line)]
    assert not found, found


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (r'rb"(?:a++|b)*+"', 1),
        (r"r'(?>a|b)'", 1),
        (r'r"a{2}+"', 1),
        (r'r"\++"', 0),
        (r'r"[*+?]+"', 0),
        (r'r"(" + r"x"', 0),
    ],
)
def test_such_patterns_are_found(line: str, count: int) -> None:
    assert len(list(wrong(line))) == count
