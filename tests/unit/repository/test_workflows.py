"""The workflows of CI are valid, have few permissions, and run the targets of the Makefile."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetkeeper_local.control_plane.programs import built, program_path

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
WRITES = {("release", "publish"): {"packages", "id-token"}, ("release", "page"): {"contents"}}
"""The permissions to write, by workflow and job; all others read."""


def _lint(*files: Path) -> subprocess.CompletedProcess[str]:
    # Without shellcheck and pyflakes, which one machine has and another has not.
    argv = [str(program_path("actionlint")), "-no-color", "-shellcheck=", "-pyflakes="]
    return subprocess.run(
        [*argv, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False
    )


def _jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = yaml.safe_load(workflow.read_text())["jobs"]
    return jobs


@pytest.mark.slow
@pytest.mark.skipif(not built("actionlint"), reason="actionlint is not built: make programs")
def test_actionlint_finds_nothing_and_finds_a_mistake(tmp_path: Path) -> None:
    done = _lint(*WORKFLOWS)
    assert (done.returncode, done.stdout) == (0, "")
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("github.ref ", "github.no_such_field "))
    done = _lint(wrong)
    assert done.returncode == 1
    assert "no_such_field" in done.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_has_the_permissions_that_it_needs_and_no_others(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text())["permissions"] == {}
    for name, job in _jobs(workflow).items():
        writes = {what for what, right in job["permissions"].items() if right != "read"}
        assert writes == WRITES.get((workflow.stem, name), set())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_and_leave_no_credentials(workflow: Path) -> None:
    for job in _jobs(workflow).values():
        for step in job["steps"]:
            if "uses" not in step:
                continue
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])
            if "checkout" in step["uses"]:
                assert step["with"]["persist-credentials"] is False


def _commands(workflow: str) -> list[str]:
    jobs = _jobs(ROOT / f".github/workflows/{workflow}.yml")
    return [step.get("run", "") for job in jobs.values() for step in job["steps"]]


def test_ci_runs_its_script_with_all_commits() -> None:
    """tests/unit/lanes holds that the script runs what `make test` runs."""
    assert ".ci/run" in _commands("ci")
    assert os.access(ROOT / ".ci/run", os.X_OK)
    (checkout,) = (
        step
        for step in _jobs(ROOT / ".github/workflows/ci.yml")["test"]["steps"]
        if "checkout" in step.get("uses", "")
    )
    assert checkout["with"]["fetch-depth"] == 0, "a shallow clone has no parent to run a test on"


def test_the_release_runs_its_target_of_the_makefile() -> None:
    assert re.search(r"^release:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line for line in _commands("release") if re.match(r"make release\b", line)]


def test_the_release_of_a_tag_is_signed_with_the_identity_of_its_workflow() -> None:
    """cosign gets that identity from GitHub, with a permission that nothing else here needs."""
    job = _jobs(ROOT / ".github/workflows/release.yml")["publish"]
    (command,) = (step["run"] for step in job["steps"] if "make release" in step.get("run", ""))
    assert "SIGN_KEYLESS=1" in command
    assert job["permissions"]["id-token"] == "write"
