"""The parts of a release that need no registry: versions, notes, names, values, profiles."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fleetkeeper_contract.version import VERSION
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.release import chart, checks, references

pytestmark = pytest.mark.exhaustive

CHANGELOG = """# Changelog
## Unreleased
Soon.

## [1.1.0] - 2026-02-01
### Added
- A thing.

## 1.0.0-rc.1
First.
## 0.9.0
## 0.8.0
"""
VALUES = (REPOSITORY / "charts/fleetkeeper/values.yaml").read_text()
DIGEST = f"sha256:{'a' * 64}"


def test_notes_are_the_section_of_the_version_alone() -> None:
    assert checks.notes(CHANGELOG, "1.1.0") == "### Added\n- A thing.\n"
    assert checks.notes(CHANGELOG, "1.0.0-rc.1") == "First.\n"


@pytest.mark.parametrize("version", ["1.0.0", "1.1.0-rc.1", "0.9.0", "1.1"])
def test_a_version_without_notes_is_not_released(version: str) -> None:
    with pytest.raises(LocalError, match=f"## {version}"):
        checks.notes(CHANGELOG, version)


def test_the_previous_version_is_that_of_the_next_section() -> None:
    assert checks.previous_version(CHANGELOG, "1.1.0") == "1.0.0-rc.1"
    assert checks.previous_version(CHANGELOG, "0.8.0") is None


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A repository with a chart of version 1.1.0."""
    (tmp_path / checks.CHART).mkdir(parents=True)
    (tmp_path / checks.CHART / "Chart.yaml").write_text("{version: 1.1.0, appVersion: 1.1.0}")
    author = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
    for words in (
        ("init", "--quiet"),
        ("add", "."),
        (*author, "-c", "commit.gpgsign=false", "commit", "--quiet", "-m", "Add"),
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.2.0", "version 1.1.0"),
        ("v1.1.0", "without a v"),
        ("1.1", "not a version"),
        ("1.1.0+a", "not a version"),
        ("01.1.0", "not a version"),
    ],
)
def test_only_the_version_of_the_chart_is_released(
    source: Path, version: str, message: str
) -> None:
    checks.check_source(source, "1.1.0")
    with pytest.raises(LocalError, match=message):
        checks.check_source(source, version)


def test_a_checkout_with_changes_is_not_released(source: Path) -> None:
    (source / "new.txt").write_text("")
    with pytest.raises(LocalError, match=r"1 changes .*new\.txt"):
        checks.check_source(source, "1.1.0")


@pytest.mark.parametrize(
    ("name", "full", "plain"),
    [
        ("vllm/vllm-openai:v1", "docker.io/vllm/vllm-openai:v1", False),
        ("debian", "docker.io/library/debian", False),
        ("ghcr.io/a/b:1", "ghcr.io/a/b:1", False),
        ("registry:5000/a:1", "registry:5000/a:1", False),
        ("127.example.com/a", "127.example.com/a", False),
        ("localhost/a", "localhost/a", True),
        ("localhost:5000/a:1", "localhost:5000/a:1", True),
        ("127.0.0.2:5000/a", "127.0.0.2:5000/a", True),
        ("127.0.0.1/a", "127.0.0.1/a", True),
        ("[::1]:5000/a", "[::1]:5000/a", True),
    ],
)
def test_a_name_has_a_registry_and_only_loopback_has_no_tls(
    name: str, full: str, plain: bool
) -> None:
    assert references.full(name) == full
    assert references.plain_http(name) is plain


@pytest.mark.parametrize("end", ["", ":v1", f"@{DIGEST}", f":v1@{DIGEST}"])
def test_a_port_is_no_tag(end: str) -> None:
    assert references.without_tag(f"h:5000/a/b{end}") == "h:5000/a/b"


@pytest.mark.parametrize(
    "answer",
    [
        "manifest unknown: manifest unknown",
        "name unknown: repository name not known to registry",
        "unknown: artifact fleetkeeper/charts/fleetkeeper:1.0.0 not found",
    ],
)
def test_a_registry_that_says_so_does_not_have_a_version(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess[str]([], 1, "", answer)
    monkeypatch.setattr(references, "attempt", lambda *_, **__: done)
    assert not references.exists("r.example.com/x:1")


@pytest.mark.parametrize(
    "answer", ["unauthorized: access denied", "no such host", "503 Service Unavailable"]
)
def test_a_registry_that_cannot_be_read_is_not_taken_for_an_empty_one(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a version could be published a second time."""
    done = subprocess.CompletedProcess[str]([], 1, "", answer)
    monkeypatch.setattr(references, "attempt", lambda *_, **__: done)
    with pytest.raises(LocalError, match=answer):
        references.exists("r.example.com/x:1")


def _pinned(text: str) -> str:
    names = chart.image_names(yaml.safe_load(text), VERSION)
    return chart.pin(
        text, VERSION, {name: f"r.example.com/x/{i}@{DIGEST}" for i, name in enumerate(names)}
    )


def test_all_images_of_the_values_are_pinned() -> None:
    names = chart.image_names(yaml.safe_load(VALUES), VERSION)
    assert len(names) == 7
    pinned = yaml.safe_load(_pinned(VALUES))
    assert pinned["image"]["repository"].startswith("r.example.com/x/")
    assert pinned["image"]["digest"] == DIGEST
    others = set(chart.image_names(pinned, VERSION)) - {
        f"{pinned['image']['repository']}:{VERSION}"
    }
    assert {name.partition("@")[2] for name in others} == {DIGEST}
    assert len(others) == 6


def test_an_image_in_another_form_is_an_error_and_not_left_by_tag() -> None:
    text = VALUES.replace(
        f"    image: fleetkeeper-engine-cpu:{VERSION}\n",
        f'    "image": fleetkeeper-engine-cpu:{VERSION}\n',
    )
    assert text != VALUES
    with pytest.raises(LocalError, match="a line of its own"):
        _pinned(text)


def test_a_profile_may_be_added_but_not_changed() -> None:
    before = yaml.safe_load(VALUES)
    now = copy.deepcopy(before)
    now["engineProfiles"]["cpu-0.32.0-2"] = {"image": "new"}
    now["engineAliases"]["cpu"] = "cpu-0.32.0-2"
    chart.check_profiles(before, now)
    for field, value in (("image", "new"), ("contract", 2), ("args", ["--new"])):
        changed = copy.deepcopy(before)
        changed["engineProfiles"]["cpu-0.32.0-1"][field] = value
        with pytest.raises(LocalError, match=rf"cpu-0\.32\.0-1\.{field} was"):
            chart.check_profiles(before, changed)


def test_the_command_refuses_half_a_mapping() -> None:
    argv = [sys.executable, "-m", "fleetkeeper_local.release", "1.0.0", "h.example.com/x"]
    done = subprocess.run(
        [*argv, "--upstream", "a:1="], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "NAME=OTHER" in done.stderr) == (1, True)
