"""The processor seconds of a run count what it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lanes import processor
from lanes.processor import ProcessorTime

BURN = "import time\nwhile time.process_time() < 0.3: pass"
DAEMON = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURN!r}])"


def _measured(code: str, first: str = "") -> str:
    """Return what a process prints that measures itself while it runs `code` in a child."""
    script = f"""
import subprocess, sys
from lanes import processor
{first}
time = processor.ProcessorTime()
subprocess.run([sys.executable, "-c", {code!r}], check=True)
used = time.used()
print(used.own_s, used.machine_s, used.source, sep="|", end="|")
print(time.close())
"""
    folder = Path(processor.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "first", ["", "processor.OWN = processor.Path('/nonexistent')"], ids=["as here", "no cgroup"]
)
def test_a_child_counts(first: str) -> None:
    own_s, machine_s, source, left = _measured(BURN, first).split("|")
    assert float(own_s) >= 0.3
    # The machine counts in ticks of 10 ms, each as a whole for who runs at its end.
    assert float(machine_s) > 0
    assert ("no cgroup" in source) or (source == "a cgroup" and not first)
    assert left == ""


def test_a_process_without_a_cgroup_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mounts").write_text("25 1 0:22 / /sys rw shared:1 - sysfs sysfs rw\n")
    monkeypatch.setattr(processor, "MOUNTS", tmp_path / "mounts")
    time = ProcessorTime()
    assert "cgroup v2 is not mounted" in time.used().source
    assert time.close() == ""


def test_a_group_that_cannot_be_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its folder can be written here, but no process can be moved into it."""
    home = tmp_path / "cgroup"
    home.mkdir()
    monkeypatch.setattr(processor, "_own_cgroup", lambda: home / "gone")
    time = ProcessorTime()
    assert "no cgroup" in time.used().source
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("root", "own", "found"),
    [
        ("/", "/", "/mnt/unified"),
        ("/", "/user.slice/a", "/mnt/unified/user.slice/a"),
        ("/docker/1", "/docker/1/in", "/mnt/unified/in"),
    ],
)
def test_the_cgroup_of_this_process_is_found_below_its_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: str, own: str, found: str
) -> None:
    (tmp_path / "mounts").write_text(
        f"30 25 0:26 {root} /mnt/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    )
    (tmp_path / "own").write_text(f"4:memory:/m\n0::{own}\n")
    monkeypatch.setattr(processor, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(processor, "OWN", tmp_path / "own")
    assert str(processor._own_cgroup()) == found
