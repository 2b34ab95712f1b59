"""Folders and modules stay small enough to find something in them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDERS: Final = ("operator", "kube", "contract", "engine_image", "gateway", "router", "local")
MAX_MODULES: Final = 16
"""Modules of one folder, without `__init__`."""
MAX_LINES: Final = 400
LONGER: Final = {
    "engine_image/fleetkeeper_engine/spec.py",
    "gateway/fleetkeeper_gateway/http/exchange.py",
    "router/fleetkeeper_router/bootstrap.py",
}
"""Modules with more lines, each one document, one request or one configuration. The list only shrinks."""


def modules() -> list[Path]:
    """Return the modules of all distributions."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 500
    return found


def test_no_folder_has_more_modules_than_fit_on_a_screen() -> None:
    counts = Counter(path.parent for path in modules() if path.name != "__init__.py")
    full = {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > MAX_MODULES}
    assert not full, f"more than {MAX_MODULES} modules; give a part of them a folder: {full}"


def test_no_other_module_is_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    assert {name for name, count in lines.items() if count > MAX_LINES} == LONGER
