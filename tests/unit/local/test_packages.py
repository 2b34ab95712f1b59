"""Debian packages are installed by one process at a time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetkeeper_local.common import packages

pytestmark = pytest.mark.exhaustive

APT = """#!/bin/sh
# An apt-get that fails beside another one, as the real one does, and installs one command.
mkdir "$SCRATCH/busy" || { echo "Could not get lock" >&2; exit 100; }
[ "$3" = install ] && sleep 0.2 && cp "$0" "$SCRATCH/bin/new-command" && echo >> "$SCRATCH/installed"
rmdir "$SCRATCH/busy"
"""


def test_two_processes_that_need_the_same_package_install_it_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second waits for the first, and finds nothing left to do."""
    (tmp_path / "bin").mkdir()
    apt = tmp_path / "bin" / "apt-get"
    apt.write_text(APT)
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(packages, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(packages, "POLICY", tmp_path / "policy-rc.d")
    with ThreadPoolExecutor(2) as pool:
        wanted = [{"new-command": "new-package"}] * 2
        assert list(pool.map(packages.ensure_packages, wanted)) == [None, None]
    assert (tmp_path / "installed").read_text() == "\n"
    assert not (tmp_path / "policy-rc.d").exists()
