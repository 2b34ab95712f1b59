"""Every generated file equals what its source generates, and its tables are well-formed."""

from __future__ import annotations

import re

import pytest

from generate import GENERATORS, ROOT

FILES = {path: text for generator in GENERATORS for path, text in generator().items()}


@pytest.mark.parametrize("path", sorted(FILES))
def test_a_generated_file_equals_its_source(path: str) -> None:
    """Run `make generate` when this fails."""
    assert (ROOT / path).read_text() == FILES[path]


@pytest.mark.parametrize("path", sorted(path for path in FILES if path.endswith(".md")))
def test_rows_of_a_page_have_the_cells_of_their_table(path: str) -> None:
    width = 0
    for line in FILES[path].splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (width and cells) or cells == width, line
        width = cells
