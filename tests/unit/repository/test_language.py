"""The words that CONTRIBUTING.md#style replaces stay out of code, messages and documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDERS: Final = (
    "operator/fleetkeeper",
    "contract",
    "engine_image",
    "gateway",
    "kube",
    "local",
    "charts",
    "crds",
    "docs",
    "examples",
    "scripts",
    "benchmarks",
)
PAGES: Final = ("README.md", "SECURITY.md", "CHANGELOG.md", "Makefile")
SUFFIXES: Final = {".py", ".md", ".yaml", ".tpl", ".txt"}
BANNED: Final = {
    r"anew": "again",
    r"as ?asked|as ?found": "as expected; externally changed",
    r"for so long": "for that time",
    r"for want of": "because there is no",
    r"(?:goes|go|serves|serve) on(?= (?:while|without|after|with|as|when|until)\b|[.,;:])": "continues",
    r"(?:it|they) shall": "must",
    r"look(?:s|ed)? again|look failed": "requeue; reconcile failed",
    r"mend(?:s|ed|ing)?": "fix, repair",
    r"of (?:ours|yours)": "our, your",
    r"stand(?:s|ing)? back": "are shed",
    r"turn(?:s|ed|ing)? away": "shed, refuse",
    r"worked off": "drained",
}
RULE: Final = re.compile("|".join(rf"(\b(?:{words})\b)" for words in BANNED), re.IGNORECASE)


def files() -> Iterator[Path]:
    """Yield every text of the repository that the rule covers; decision records quote old words."""
    yield from (ROOT / page for page in PAGES)
    for folder in FOLDERS:
        paths = sorted((ROOT / folder).rglob("*"))
        assert paths, f"no file in {folder}"
        for path in paths:
            if path.suffix in SUFFIXES and "adr" not in path.parts and path.is_file():
                yield path


def problems(text: str) -> list[str]:
    """Return each line that has a banned word, with what to write instead."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for match in RULE.finditer(line):
            instead = list(BANNED.values())[(match.lastindex or 1) - 1]
            found.append(f"{number}: {match.group()!r}, write {instead!r}")
    return found


def test_no_text_uses_a_replaced_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{problem}"
        for path in files()
        for problem in problems(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_rule_finds_its_words() -> None:
    assert problems("a queue of ours\nfine\nit goes on.") == [
        "1: 'of ours', write 'our, your'",
        "3: 'goes on', write 'continues'",
    ]
