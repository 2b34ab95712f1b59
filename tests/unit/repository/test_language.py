"""The words that CONTRIBUTING.md#style replaces stay out of code, messages and documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.unit.repository.files_with_replaced_words import FILES

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDERS: Final = (
    "operator",
    "router",
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
    "tests",
)
PAGES: Final = ("README.md", "SECURITY.md", "CHANGELOG.md", "Makefile")
SUFFIXES: Final = {".py", ".md", ".yaml", ".tpl", ".txt", ".lua", ".js", ".html"}
BANNED: Final = {
    r"anew": "again",
    r"as ?asked|as ?found": "as expected; externally changed",
    r"for so long": "for that time",
    r"for want of": "because there is no",
    r"(?:goes|go|serves|serve) on(?= (?:while|without|after|with|as|when|until)\b|[.,;:])": "continues",
    r"(?:it|they) shall": "must",
    r"look(?:s|ed)? again|look failed": "requeue; reconcile failed",
    r"look(?:s|ed|ing)? at|(?:a|each|two) looks?(?!-)": "check, read",
    r"mend(?:s|ed|ing)?": "fix, repair",
    r"nobody|no one": "no user, no client; or an active verb",
    r"of (?:ours|yours)": "our, your",
    r"stand(?:s|ing)? back": "are shed",
    r"(?<!\.)(?:tells?|told|telling)": "report, show, distinguish",
    r"turn(?:s|ed|ing)? away": "shed, refuse",
    r"whoever|whatever": "a user who, any, also if",
    r"worked off": "drained",
    r"(?-i:_*(?:MOST|LONGEST)_(?!LOADED|REQUEST)[A-Z]\w*)": "MAX_",
    r"(?-i:_*(?:LEAST|SHORTEST)_(?!LOADED|REQUEST)[A-Z]\w*)": "MIN_",
    r"(?:for (?:\w+, )*one(?:, \w+)* in|lambda one)": "a variable with the name of the thing",
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
    known = {Path(__file__), *(ROOT / file for file in FILES)}
    found = [
        f"{path.relative_to(ROOT)}:{problem}"
        for path in files()
        if path not in known
        for problem in problems(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_list_of_files_with_replaced_words_only_shrinks() -> None:
    """Every listed file is a test and still has such a word. Remove a clean file from the list."""
    assert all(file.startswith("tests/") for file in FILES)
    gone = [file for file in FILES if not (ROOT / file).is_file()]
    assert not gone, f"remove from the list: {gone}"
    clean = [file for file in FILES if not problems((ROOT / file).read_text())]
    assert not clean, f"remove from the list: {clean}"


def test_the_rule_finds_its_words() -> None:
    text = (
        "a queue of ours\nfine\nit goes on.\nfile.tell()\nNobody told it.\n_MOST_LINES = most_lines\n"
        "LEAST_LOADED, a look-ahead\n[one for key, one in pairs]\n"
    )
    assert problems(text) == [
        "1: 'of ours', write 'our, your'",
        "3: 'goes on', write 'continues'",
        "5: 'Nobody', write 'no user, no client; or an active verb'",
        "5: 'told', write 'report, show, distinguish'",
        "6: '_MOST_LINES', write 'MAX_'",
        "8: 'for key, one in', write 'a variable with the name of the thing'",
    ]
