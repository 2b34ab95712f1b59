"""`make check` fails for a promise that no test holds."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from lanes import promises
from lanes.check import problems as all_problems
from lanes.marks import ROOT
from lanes.quarantine import Entry

README = """# Page
Anything may be here.

## How it works
| measured | done |
| --- | --- |
| nothing | Nothing is removed. |

- It changes limits in a running engine. No restart.
"""
SECURITY = """# Security
## Reporting
- Privately.

## Threats
- Nobody reads keys.
"""
PROMISES = """
README.md:
  removal: {sentence: Nothing is removed.}
  live: {sentence: It changes limits in a running engine., real: true}
SECURITY.md:
  keys: {sentence: Nobody reads keys.}
"""
TESTS = {
    "tests/unit/test_a.py": """
@pytest.mark.promise("removal", "live")
def test_pure(): ...

class TestKeys:
    @pytest.mark.promise("keys")
    @pytest.mark.slow
    async def test_keys(self): ...
""",
    "tests/engine/test_b.py": """
@pytest.mark.promise("live")
def test_live(engine): ...
""",
}
LIVE = "tests/engine/test_b.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {
        "README.md": README,
        "SECURITY.md": SECURITY,
        promises.FILE: PROMISES,
        **TESTS,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def _problem(root: Path, *entries: Entry) -> str:
    (problem,) = promises.problems(root, entries)
    return problem


def test_nothing_is_wrong_with_the_promises_of_this_repository() -> None:
    assert all_problems(ROOT) == []


def test_promises_that_are_held_are_no_problem(root: Path) -> None:
    assert promises.problems(root, []) == []


def test_a_promise_without_a_test_is_named(root: Path) -> None:
    _replace(root / "tests/unit/test_a.py", '@pytest.mark.promise("keys")', "")
    assert "promise keys: no test has the mark" in _problem(root)


def test_a_mark_of_a_renamed_promise_is_named(root: Path) -> None:
    _replace(root / "tests/unit/test_a.py", '"removal"', '"removals"')
    renamed, missing = promises.problems(root, [])
    assert "test_pure: there is no promise 'removals'" in renamed
    assert "promise removal: no test" in missing


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md"])
def test_a_changed_sentence_is_named_with_its_line(root: Path, page: str) -> None:
    old, new, name = {
        "README.md": ("Nothing is removed.", "Little is removed.", "removal"),
        "SECURITY.md": ("Nobody reads keys.", "Few read keys.", "keys"),
    }[page]
    _replace(root / page, old, new)
    changed, line = promises.problems(root, [])
    assert f"promise {name}: {page} does not have its sentence" in changed
    assert new in line


def test_a_claim_without_a_promise_is_named(root: Path) -> None:
    (root / "SECURITY.md").write_text(SECURITY + "- Nobody reads prompts.\n")
    assert "SECURITY.md:7: no promise" in _problem(root)


def test_a_new_section_of_security_is_named(root: Path) -> None:
    (root / "SECURITY.md").write_text(SECURITY + "\n## Quantum\n- Nobody entangles keys.\n")
    assert "add section 'Quantum'" in _problem(root)


@pytest.mark.parametrize(
    "mark",
    [
        ("@pytest.mark.slow", "@pytest.mark.exhaustive"),
        ("class TestKeys", "@pytest.mark.exhaustive\nclass TestKeys"),
        (
            "class TestKeys",
            "pytestmark = [pytest.mark.timeout(5), pytest.mark.exhaustive]\nclass TestKeys",
        ),
    ],
    ids=["function", "class", "module"],
)
def test_a_promise_of_exhaustive_tests_alone_is_named(root: Path, mark: tuple[str, str]) -> None:
    _replace(root / "tests/unit/test_a.py", *mark)
    assert any(
        "promise keys: `make test` leaves out all" in found for found in promises.problems(root, [])
    )


def test_parameters_with_the_mark_exhaustive_leave_the_others(root: Path) -> None:
    more = '@pytest.mark.parametrize("n", keep_first(1, (1, 2), pytest.mark.exhaustive))'
    _replace(root / "tests/unit/test_a.py", "@pytest.mark.slow", more)
    assert promises.problems(root, []) == []


def test_the_only_test_of_a_promise_may_not_be_in_quarantine(root: Path) -> None:
    entry = Entry("tests/unit/test_a.py::TestKeys::test_keys[some]", "flaky", date(2026, 3, 10))
    assert "promise keys: `make test` leaves out all" in _problem(root, entry)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def test_live", "@pytest.mark.simulated\ndef test_live"),
        ("@pytest.mark.promise", "pytestmark = pytest.mark.simulated\n@pytest.mark.promise"),
        ("(engine)", "(simulated_engine)"),
        ("def test_live(engine)", '@pytest.mark.usefixtures("simulated_fleet")\ndef test_live()'),
        ('@pytest.mark.promise("live")', ""),
    ],
    ids=["mark", "module", "fixture", "used fixture", "pure tests alone"],
)
def test_a_promise_about_vllm_needs_a_test_on_vllm(root: Path, old: str, new: str) -> None:
    _replace(root / LIVE, old, new)
    assert "promise live: no test of it in `make test` runs vLLM" in _problem(root)


def test_a_file_of_simulated_engines_holds_no_promise_about_vllm(root: Path) -> None:
    (root / LIVE).rename(root / "tests/engine/test_simulated.py")
    assert "promise live: no test of it in `make test` runs vLLM" in _problem(root)


def test_a_sentence_about_engines_says_whether_it_is_about_vllm(root: Path) -> None:
    _replace(root / promises.FILE, ", real: true", "")
    assert "promise live: it names vLLM, GPUs, memory or limits" in _problem(root)


def test_a_name_is_given_once(root: Path) -> None:
    _replace(root / promises.FILE, "  keys: {sentence", "  removal: {sentence")
    assert f"{promises.FILE}: removal is there twice" in promises.problems(root, [])


@pytest.mark.parametrize("arguments", ["", "(NAME)", '("keys", page="a")', "(1)"])
def test_a_mark_that_cannot_be_read_is_refused(root: Path, arguments: str) -> None:
    _replace(root / "tests/unit/test_a.py", '("keys")', arguments + "  # promise()")
    with pytest.raises(ValueError, match="test_keys: write the arguments"):
        promises.problems(root, [])
