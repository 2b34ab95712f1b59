"""Commands in README and docs, and where each of them runs.

Every fenced block of shell says in its info string where it runs: ```bash run=unit (no cluster),
run=cluster (a real API server with the operator and a service team-a/chat), run=none (it cannot run
in a test; NOT_RUN says why). Blocks of one page run in order, in one shell.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLS = frozenset({"bash", "sh", "shell", "console"})
PLACES = frozenset({"unit", "cluster", "none"})
LINKED = ("charts", "crds", "examples")
"""What commands name, seen from the repository's root."""

NOT_RUN: Mapping[str, str] = {
    r"((DEMO_KUBECONFIG|PYTEST_ADDOPTS)=.* )?make (demo|test|test-[a-z0-9]+|setup|setup-engine|check|programs|lock|images|help)\b": "a stage of its own: .ci/run, or the test itself",
    r"sudo ": "needs root and the whole machine; tests/e2e/test_node_lifecycle.py does the same",
    r"alias kubectl=|export KUBECONFIG=|fleetkeeper crds|fleetkeeper run": "goes with the control plane that the line before started",
    r".*record_decisions": "takes half a minute; tests/unit/repository/test_record_decisions.py runs a part",
    r"REGISTRY=": "names a registry that is the reader's",
    r"kind (create|load|delete) ": "needs a container engine, which the machine of the tests lacks",
    r"podman |docker |buildah |for image in |done$": "builds images for minutes; tests/e2e builds and runs them",
    r"git (tag|push) |skopeo |sha256sum |helm (pull|registry|show) |.*make release |fleetkeeper mirror |pip install ": "needs a registry; tests/cluster/chart/test_release.py publishes a release, verifies and mirrors it",
    r"cosign ": "needs cosign; tests/cluster/chart/test_release_signed.py signs and verifies",
    r"helm (package|push)": "needs a registry of the reader's; tests/cluster/chart/test_gitops.py renders the chart with the examples' values",
    r"helm (install|upgrade|uninstall)": "needs the images; tests/cluster/chart/test_install.py installs, upgrades and removes",
    r"kubectl (--namespace|-n) fleetkeeper-system ": "needs the chart's pods; tests/cluster/chart/test_install.py has it",
    r"kubectl -n team-a logs ": "fake pods have no log; tests/e2e reads real ones",
    r"kubectl -n (team-a|monitoring) port-forward |curl ": "fake pods answer nothing; tests/e2e and tests/engine ask real ones",
    r"kubectl create deployment mine": "needs an image of the reader's",
    r"kubectl get namespace team-a ": "is meant for a namespace that is being deleted",
    r"kubectl delete ": "would remove what other tests use",
    r"fleetkeeper simulate .*--fit-from-prometheus": "needs a Prometheus with an hour of load; tests/unit/commands/test_prometheus_fit.py fits such series",
    r"fleetkeeper signing-keys rotate ": "needs the Secret of the chart; tests/cluster/chart/test_signing_keys.py rotates one",
    r"fleetkeeper console|ssh -t -L ": "serves until it is stopped; tests/unit/console and tests/cluster/console open it",
    r"fleetkeeper keys create ": "needs the namespace of an installed gateway; tests/e2e/test_service_gateway.py creates keys",
    r"fleetkeeper wake ": "needs a service that sleeps; tests/unit/commands/test_wake.py runs the command",
    r"fleetkeeper usage ": "needs the gateway; tests/gateway/usage/test_process.py runs its process, and tests/unit/commands/test_usage.py the command",
    r"fleetkeeper batch |export FLEETKEEPER_": "needs the batch process; tests/unit/commands/test_batch.py runs the commands against a server that speaks its API",
    r"fleetkeeper local ": "starts a cluster; tests/cluster/local/test_controlplane.py and tests/e2e do",
    r"\.venv-engine/bin/|while |for n in ": "needs vLLM; tests/engine does the same",
}
"""Commands that no test of the docs runs, by how they begin, and why."""


@dataclass(frozen=True)
class Block:
    """A fenced block of shell in a page."""

    page: str
    line: int
    place: str
    commands: str

    @property
    def lines(self) -> list[str]:
        """Its commands, one a line; continued lines are one."""
        text = re.sub(r"\\\n\s*", "", self.commands)
        return [line.strip() for line in text.splitlines() if line.strip()]


def pages() -> list[Path]:
    """README, the chart's README and everything below docs, as people read it."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    return [*top, ROOT / "charts/fleetkeeper/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shell_blocks(page: Path) -> Iterator[Block]:
    """Its blocks of shell, in order."""
    name = str(page.relative_to(ROOT))
    held: list[str] = []
    start, info = 0, ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = line.strip()
        if fence.startswith("```") and not start:
            start, info, held = number, fence.removeprefix("```"), []
        elif fence == "```":
            if info.split(" ")[0] in SHELLS:
                yield _block(name, start, info, held)
            start = 0
        else:
            held.append(line)


def _block(page: str, line: int, info: str, lines: list[str]) -> Block:
    indent = min((len(text) - len(text.lstrip()) for text in lines if text.strip()), default=0)
    text = "\n".join(part[indent:] for part in lines)
    if info.startswith("console"):
        text = _prompted(text)
    return Block(page, line, info.partition("run=")[2].strip(), text)


def _prompted(text: str) -> str:
    """What stands behind `$ `, continued lines with it; the rest is what the program answers."""
    kept, goes_on = [], False
    for line in text.splitlines():
        if line.startswith("$ ") or goes_on:
            kept.append(line.removeprefix("$ "))
            goes_on = line.endswith("\\")
    return "\n".join(kept)


def blocks_by_page(place: str) -> dict[str, list[Block]]:
    """{page: its blocks for this place}, pages without any left out."""
    found = {
        str(page.relative_to(ROOT)): [block for block in shell_blocks(page) if block.place == place]
        for page in pages()
    }
    return {page: blocks for page, blocks in found.items() if blocks}


def run_blocks(
    blocks: list[Block], directory: Path, environment: Mapping[str, str], timeout_s: float
) -> str:
    """Runs blocks in one shell, in a folder that looks like the repository's root; returns the output.

    Raises:
        AssertionError: a command ended with a status other than 0; the message names its block.
    """
    for name in LINKED:
        if not (directory / name).exists():
            (directory / name).symlink_to(ROOT / name)
    script = "\n".join(
        f"echo '== {block.page}:{block.line}' >&2\n{block.commands}" for block in blocks
    )
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n--\n{done.stdout[-3000:]}"
    return done.stdout
