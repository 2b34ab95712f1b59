"""Strings of a certain form, with a sentence for a value that does not have it.

A regular expression does not say what to write instead. So the CRD has a CEL rule with these
sentences in place of a pattern, and the operator uses the same ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class Form:
    """A marker of `str` fields: the pattern of valid values and what to do about other ones.

    `mistakes` are (pattern, sentence) of known mistakes; the first that matches replaces `sentence`.
    With `as_pattern`, the CRD has the pattern instead of a CEL rule, for values of long lists, whose
    CEL rules the API server refuses as too expensive.
    """

    pattern: str
    sentence: str
    mistakes: tuple[tuple[str, str], ...] = ()
    as_pattern: bool = False

    def problem(self, text: str) -> str | None:
        """Return what is wrong with the text and what to write, or None if it is valid."""
        if _compiled(self.pattern).search(text):
            return None
        for pattern, sentence in self.mistakes:
            if _compiled(pattern).search(text):
                return sentence
        return self.sentence

    def checked(self, text: str) -> str:
        """Return the text if it is valid.

        Raises:
            ValueError: The text is invalid. The message is `problem`.
        """
        problem = self.problem(text)
        if problem is not None:
            raise ValueError(problem)
        return text

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check the form after the type and the length."""
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add the pattern."""
        return {**handler(core), "pattern": self.pattern}


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile with the meaning of Go: `$` is the end of the text, and never before a last newline."""
    ends = pattern.endswith("$") and not pattern.endswith(r"\$")
    return re.compile(f"{pattern[:-1]}\\Z" if ends else pattern)
