"""A catalogue of the texts in the code that people read: conditions, events, errors, logs, help.

Each text is a string of at least three words that is not a docstring. `make generate` writes the
catalogue, so that a change of wording shows as one diff and all texts can be read together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "operator": "operator/fleetkeeper",
    "contract": "contract/fleetkeeper_contract",
    "steps": "contract/fleetkeeper_steps",
    "engine": "engine_image/fleetkeeper_engine",
    "gateway": "gateway/fleetkeeper_gateway",
    "kube": "kube/fleetkeeper_kube",
    "local": "local/fleetkeeper_local",
    "router": "router/fleetkeeper_router",
}
MIN_WORDS = 3
_WORDS = re.compile(r"[A-Za-z][a-z']+(?: |$)")


def generated_files() -> dict[str, str]:
    """Return one catalogue for each package, as {path: text}."""
    return {
        f"tests/golden/texts/{name}.txt": catalogue(ROOT / path) for name, path in PACKAGES.items()
    }


def catalogue(package: Path) -> str:
    """Return the texts of every module in order, below the module's path."""
    lines = []
    for module in sorted(package.rglob("*.py")):
        texts = list(texts_of(ast.parse(module.read_text())))
        if texts:
            lines += [f"## {module.relative_to(ROOT)}", *texts, ""]
    return "\n".join(lines)


def texts_of(tree: ast.Module) -> Iterator[str]:
    """Yield each text of a module; a placeholder of an f-string shows as its expression."""
    skipped = set(_docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in ast.walk(node) if part is not node)
    for node in sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)),
        key=lambda node: (node.lineno, node.col_offset),
    ):
        if id(node) in skipped:
            continue
        text = _text(node)
        if len(_WORDS.findall(text)) >= MIN_WORDS:
            yield " ".join(text.split())


def _docstrings(tree: ast.Module) -> Iterator[int]:
    """Yield the ids of the constants that stand alone: docstrings, of attributes too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else _text(part)
        for part in node.values
        if isinstance(part, ast.FormattedValue | ast.Constant)
    )
