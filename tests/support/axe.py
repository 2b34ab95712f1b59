"""Rules of accessibility, checked by axe-core in the browser. Its package is fetched from npm once."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

from fleetkeeper_local.common.paths import cache_dir
from tests.support.browser import Tab

VERSION: Final = "4.11.1"
SHA512: Final = (
    "BASOg+YwO2C+346x3LZOeoovTIoTrRqEsqMa6fmfAV0P+U9mFr9NsyOEpiYvFjbc64NMrSswhV50WdXzdb/Z5A=="
)
"""Of the package, as in npm's lock files (base64)."""
RULES: Final = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def axe_script() -> str | None:
    """Return the script, None if it is neither in the cache nor can be fetched here: npm is missing.

    Raises:
        ValueError: npm has another package than the pinned one.
    """
    kept = cache_dir() / f"axe-core-{VERSION}.js"
    if not kept.exists():
        if shutil.which("npm") is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            kept.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(folder) / "axe.js"
            partial.write_bytes(_fetched(Path(folder)))
            shutil.move(partial, kept)
    return kept.read_text()


def _fetched(folder: Path) -> bytes:
    subprocess.run(
        ["npm", "pack", f"axe-core@{VERSION}", "--silent", "--ignore-scripts"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (package,) = folder.glob("*.tgz")
    found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if found != SHA512:
        raise ValueError(f"axe-core {VERSION} has the digest {found}; {SHA512} is pinned")
    with tarfile.open(package) as files:
        script = files.extractfile("package/axe.min.js")
        assert script is not None
        return script.read()


async def violations(tab: Tab, script: str) -> list[str]:
    """Return what axe-core finds in the page as it is: rule and places."""
    await tab.value(f"{script}\n;0")
    found: list[dict[str, Any]] = await tab.value(
        f"axe.run(document, {{runOnly: {RULES}}}).then((result) => result.violations)"
    )
    return [
        f"{each['id']}: {each['help']}: {[node['target'] for node in each['nodes']]}"
        for each in found
    ]
