"""Values in brackets within a text, from the opening bracket to the one that closes it.

Logs have such values as JSON, as Python's repr, and as either of them in a JSON string, where each
quote has a backslash.
"""

from __future__ import annotations

import re
from typing import Final

MAX_VALUE: Final = 64 * 1024
"""The number of characters in which the closing bracket is searched."""
MAX_UNCLOSED: Final = 4096
"""The number of characters of a value that nothing closes, as in a truncated log line."""
_CLOSING: Final = {"[": "]", "(": ")", "{": "}"}
_MARKS: Final = re.compile(r"(\\*)([\"'])|[][(){}]")


def value_end(text: str, start: int) -> int:
    """Return where the value ends whose opening bracket is at `start`.

    A value that nothing closes ends with its line, at the earliest after `MAX_UNCLOSED` characters.
    """
    return _closed_end(text, start) or _unclosed_end(text, start)


def _closed_end(text: str, start: int) -> int:
    """Return the position after the closing bracket, 0 if there is none."""
    expected: list[str] = []
    string: tuple[int, str] | None = None
    for mark in _MARKS.finditer(text, start, start + MAX_VALUE):
        quote = mark.group(2)
        if quote:
            string = _string_after(string, len(mark.group(1)), quote)
        elif string is None and mark.group() in _CLOSING:
            expected.append(_CLOSING[mark.group()])
        elif string is None and mark.group() == expected[-1]:
            expected.pop()
            if not expected:
                return mark.end()
    return 0


def _string_after(
    string: tuple[int, str] | None, backslashes: int, quote: str
) -> tuple[int, str] | None:
    """Return the quote that the string began with, None if this quote ended it."""
    if string is None:
        return backslashes, quote
    begun, mark = string
    ends = quote == mark and (backslashes == begun or (begun == 0 and backslashes % 2 == 0))
    return None if ends else string


def _unclosed_end(text: str, start: int) -> int:
    line = text.find("\n", start, start + MAX_VALUE)
    end = start + MAX_VALUE if line < 0 else line
    return min(len(text), max(end, start + MAX_UNCLOSED))
