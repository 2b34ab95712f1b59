"""The pages hold together: links lead somewhere, commands run or say why not, nothing of one machine."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetkeeper.api.parse import InvalidService, parse_service
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from tests.support.docs_commands import (
    NOT_RUN,
    PLACES,
    ROOT,
    blocks_by_page,
    pages,
    run_blocks,
    shell_blocks,
)

PAGES = pages()
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
UNIT = blocks_by_page("unit")
GUARD_S = 800.0
"""For the commands of a page; some simulate for a minute of a core."""
_INLINE = re.compile(r"`[^`\n]*`")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _prose(page: Path) -> str:
    """The text without fenced blocks."""
    return re.sub(r"^\s*```.*?^\s*```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The anchors that a page's headings have on the usual renderers."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    """Relative ones; addresses of the world are left to their owners."""
    for page in PAGES:
        for target in LINK.findall(_INLINE.sub("", _prose(page))):
            if target.startswith(("https://", "http://", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{_name(page)} links to {target}"
            assert ROOT in (file, *file.parents), f"{target} leads out of the repository"
            if anchor:
                assert anchor in _anchors(file), f"{_name(page)} links to {target}: no such heading"


def test_rows_of_a_page_have_the_cells_of_their_table() -> None:
    for page in PAGES:
        width = 0
        for line in _prose(page).splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            assert not (width and cells) or cells == width, f"{_name(page)}: {line}"
            width = cells


def test_every_page_is_reached_from_the_readme() -> None:
    """By links of pages that are reached."""
    seen, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for target in LINK.findall(page.read_text()):
            file = (page.parent / target.partition("#")[0]).resolve()
            if file.is_dir():
                waiting += file.glob("*.md")
            elif file.exists():
                waiting.append(file)
    assert {_name(page) for page in PAGES} <= {_name(page) for page in seen}


def test_files_that_a_page_names_exist() -> None:
    """Examples, tests, scripts, in text and in commands."""
    named = r"(?<![\w/.-])((?:examples|tests|scripts|benchmarks|engine_image|operator|local|charts|docs)/[\w./*-]+\.\w+)"
    for page in PAGES:
        for path in re.findall(named, page.read_text()):
            assert list(ROOT.glob(path)), f"{_name(page)} names {path}"


def test_a_page_knows_no_machine_but_the_readers() -> None:
    for page in PAGES:
        text = page.read_text()
        assert not re.search(r"/(root|home/\w+|work|Users/\w+)/", text), _name(page)
        assert "TODO" not in text, _name(page)


def test_every_block_of_shell_says_where_it_runs() -> None:
    """And one that runs nowhere begins every command with one whose reason is known."""
    for page in PAGES:
        for block in shell_blocks(page):
            assert block.place in PLACES, (
                f"{_name(page)}:{block.line}: say run=unit, cluster or none"
            )
            if block.place != "none":
                continue
            for line in block.lines:
                command = re.sub(r"\s+#.*$", "", line)
                known = (
                    not command
                    or command.startswith(("#", "-"))
                    or any(re.match(begin, command) for begin in NOT_RUN)
                )
                assert known, f"{_name(page)}:{block.line}: why is `{command}` not run?"


def test_every_reason_not_to_run_is_needed() -> None:
    lines = [
        line
        for page in PAGES
        for block in shell_blocks(page)
        if block.place == "none"
        for line in block.lines
    ]
    idle = [begin for begin in NOT_RUN if not any(re.match(begin, line) for line in lines)]
    assert idle == []


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(UNIT))
def test_commands_that_need_no_cluster_run(page: str, tmp_path: Path) -> None:
    """In a folder with the examples, as a reader would from the checkout."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
    }
    run_blocks(UNIT[page], tmp_path, environment, timeout_s=GUARD_S)


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for line in re.findall(r"(?:^|`)make ((?:[a-z0-9-]+ ?)+)", page.read_text(), re.MULTILINE):
            unknown = set(line.split()) - targets
            assert not unknown, f"{_name(page)} names make {' '.join(sorted(unknown))}"


# -- what a change of the spec does: the table in docs/operations.md -----------------------------------

QUIET = {
    "paused": True,
    "suspend": True,
    "replicas": 3,
    "scaling.mode": "Advisory",
    "scaling.minReplicas": 2,
    "scaling.maxReplicas": 9,
    "scaling.scaleDownDelaySeconds": 100,
    "breaker.mode": "Disabled",
    "breaker.fallbackReplicas": 3,
    "batching.mode": "Fixed",
    "memory.restartFragmented": True,
    "objectives.attainmentPercent": 90,
    "disruption.maxUnavailable": 2,
    "rollout.strategy": "Surge",
    "rollout.maxSurge": 2,
    "rollout.maxUnavailable": 1,
    "rollout.onFailure": "Hold",
    "rollout.engineUpdates": "Automatic",
    "routing.policy": "RoundRobin",
    "routing.replicas": 3,
    "networkPolicy.preset": "SameNamespace",
    "tiers.batch.sharePercent": 40,
    "objectives.queueWaitMilliseconds": 300,
    "objectives.batchTimeMilliseconds": 40,
}
ROLLED_OUT = {
    "model.servedName": "other",
    "engine.maxModelLength": 1024,
    "resources.cpu": "3",
    "resources.ephemeralStorage": "10Gi",
    "resources.claims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    "memory.capPercent": 70,
    "batching.maxSequences": 128,
    "batching.minTokens": 512,
    "rollout.drainSeconds": 60,
    "rollout.startupSeconds": 600,
    "placement.topologySpreadConstraints": [],
    "podMetadata.labels": {"team": "a"},
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccountName": "model-reader",
}


def _template_hash(path: str = "", value: object = None) -> str:
    spec: dict[str, object] = {"model": {"source": "pvc://models/x"}}
    section = spec
    *parents, field = path.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})  # type: ignore[assignment]
    if field:
        section[field] = value
    service = parse_service(
        {
            "apiVersion": "fleetkeeper.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "chat", "namespace": "team-a", "uid": "u", "generation": 1},
            "spec": spec,
        }
    )
    context = default_context()
    template = desired_engine_template(service, context.catalog.resolve("cuda"), context)
    return str(template["metadata"]["annotations"]["fleetkeeper.io/template-hash"])


def test_a_change_that_the_docs_call_quiet_restarts_no_engine() -> None:
    for path, value in QUIET.items():
        assert _template_hash(path, value) == _template_hash(), path


def test_a_change_that_the_docs_call_a_roll_out_is_one() -> None:
    for path, value in ROLLED_OUT.items():
        assert _template_hash(path, value) != _template_hash(), path


# -- YAML in pages ---------------------------------------------------------------------------------------


def _specs() -> list[tuple[str, dict[str, Any]]]:
    """(page, spec) of every block of YAML that is a service, a spec or sections of one."""
    found = []
    for page in PAGES:
        for text in re.findall(r"^```yaml$(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            held = yaml.safe_load(text)
            spec = held.get("spec", held)
            if spec and set(spec) <= {
                info.alias or name for name, info in InferenceServiceSpec.model_fields.items()
            }:
                found.append((_name(page), spec))
    return found


def test_yaml_that_a_page_shows_is_taken() -> None:
    """Whole services as they are, sections of a spec beside a model."""
    metadata = {"name": "chat", "namespace": "team-a", "uid": "u", "generation": 1}
    refused = {}
    for page, spec in _specs():
        whole = {"model": {"source": "pvc://models/x"}, **spec}
        try:
            parse_service(
                {
                    "apiVersion": "fleetkeeper.io/v1alpha1",
                    "kind": "InferenceService",
                    "metadata": metadata,
                    "spec": whole,
                }
            )
        except InvalidService as error:
            refused[page] = str(error)
    assert refused == {}


def test_pages_show_yaml_that_is_tried() -> None:
    assert {page for page, _ in _specs()} >= {"README.md", "docs/objectives.md", "docs/tiers.md"}


def _profiles() -> list[tuple[str, str, dict[str, Any]]]:
    """(page, name, profile) of every engine profile in the YAML of a page."""
    found = []
    for page in PAGES:
        for text in re.findall(r"^```yaml$(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            held = yaml.safe_load(text)
            for name, profile in (held.get("engineProfiles") or {}).items():
                found.append((_name(page), name, profile))
    return found


def test_an_engine_profile_that_a_page_shows_is_accepted() -> None:
    """Those of values for the chart that change a part of a profile are completed by its own."""
    defaults = {item.name: item for item in default_context().catalog.profiles}
    for page, name, profile in _profiles():
        default = defaults.get(name)
        whole = {**(default.to_manifest() if default else {}), **profile, "name": name}
        assert EngineProfile.model_validate(whole).name == name, page


def test_pages_show_engine_profiles() -> None:
    assert "docs/engine-profiles.md" in {page for page, _, _ in _profiles()}
