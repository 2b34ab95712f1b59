"""The tests and their marks, read from the source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
REAL_LANES: Final = frozenset({"engine", "e2e"})
"""The folders of tests that run vLLM itself."""


@dataclass(frozen=True, slots=True)
class MarkedTest:
    """A test function with the marks of itself, its class and its module."""

    nodeid: str
    """As pytest prints it, without parameters."""
    marks: frozenset[str]
    promises: tuple[str, ...]
    fixtures: frozenset[str]
    """Its arguments, and the fixtures that its marks `usefixtures` name."""

    @property
    def lane(self) -> str:
        """Return the folder below `tests`."""
        return self.nodeid.split("/")[1]

    @property
    def exhaustive(self) -> bool:
        """Return whether `make test` leaves it out.

        A parameter with a mark of its own does not count: the other parameters run.
        """
        return "exhaustive" in self.marks

    @property
    def on_vllm(self) -> bool:
        """Return whether it runs vLLM: its folder does, and neither mark, path nor fixture says simulated."""
        names = {*self.marks, *self.fixtures, self.nodeid.partition("::")[0]}
        return self.lane in REAL_LANES and not any("simulated" in name for name in names)


def read_tests(root: Path, files: Iterable[Path] | None = None, text: str = "") -> list[MarkedTest]:
    """Return the tests of the files that contain `text`, in order; of all files below `tests` by default."""
    found: list[MarkedTest] = []
    for file in files if files is not None else sorted((root / "tests").rglob("test_*.py")):
        source = file.read_text()
        if text in source:
            name = file.relative_to(root).as_posix()
            found += _functions(ast.parse(source, filename=name), name, [])
    return found


def _functions(
    parent: ast.Module | ast.ClassDef, prefix: str, inherited: list[ast.expr]
) -> Iterator[MarkedTest]:
    marks = inherited + [mark for node in parent.body for mark in _pytestmark(node)]
    for node in parent.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _functions(node, f"{prefix}::{node.name}", marks + node.decorator_list)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test"
        ):
            yield _marked(node, prefix, marks + node.decorator_list)


def _pytestmark(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
        return node.value.elts if isinstance(node.value, ast.List) else [node.value]
    return []


def _marked(
    function: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str, decorators: list[ast.expr]
) -> MarkedTest:
    nodeid = f"{prefix}::{function.name}"
    marks: set[str] = set()
    promises: list[str] = []
    fixtures = {argument.arg for argument in function.args.args + function.args.kwonlyargs}
    for decorator in decorators:
        call = decorator if isinstance(decorator, ast.Call) else None
        dotted = ast.unparse(call.func if call else decorator)
        mark = dotted.removeprefix("pytest.mark.")
        if mark == dotted:
            continue
        marks.add(mark)
        if mark == "promise":
            promises += _literals(call, nodeid)
        elif mark == "usefixtures":
            fixtures.update(_literals(call, nodeid))
    return MarkedTest(nodeid, frozenset(marks), tuple(promises), frozenset(fixtures))


def _literals(call: ast.Call | None, nodeid: str) -> list[str]:
    """Return the arguments of a mark; raise ValueError if they are no plain strings."""
    values = (
        [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        if call
        else []
    )
    texts = [value for value in values if isinstance(value, str)]
    if call is None or call.keywords or not texts or len(texts) != len(call.args):
        raise ValueError(f"{nodeid}: write the arguments of its marks as plain strings")
    return texts
