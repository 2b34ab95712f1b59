"""A batch that runs through the demo: what may wait beside what may not."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.demo.cluster import COMMAND_TIMEOUT_S, Cluster, CommandError, fleetkeeper
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.summary import summarise

LINES = 200
ANSWER_TOKENS = 48
ENDPOINT = "/v1/completions"
KEY = "demo-batch"
SELECTOR = "app.kubernetes.io/name=fleetkeeper,app.kubernetes.io/component=gateway-batch"
ADMIN_PORT = 8084
REFUSED = re.compile(
    r'^fleetkeeper_gateway_batch_lines_total\{outcome="(?:key_)?refused"\} (\S+)$', re.MULTILINE
)
END_TIMEOUT_S = 900.0
"""For all lines, once the load has ended: seconds, unless engines are replaced."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The batch at the end of a stage."""

    stage: str
    at_s: float
    done: int
    failed: int
    refused: int | None
    """Times that an engine refused a line until then; None if the metrics cannot be read."""


@dataclass
class WaitingWork:
    """A batch of one key.

    Attributes:
        cluster: where the batch process runs.
        namespace: of the release.
        url: of the batch Service from here.
        key: of a client.
        model: that the lines name.
        folder: for the input file and the results.
        lines: of the input file.
    """

    cluster: Cluster
    namespace: str
    url: str
    key: str
    model: str
    folder: Path
    lines: int = LINES
    batch_id: str = ""
    seen: list[Seen] = field(default_factory=list)

    def submit(self) -> str:
        """Submit the batch; return what was done, for the timeline.

        Raises:
            LocalError: it was refused.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "batch.jsonl"
        path.write_text("".join(f"{line}\n" for line in desired_lines(self.model, self.lines)))
        self.batch_id = self._command("submit", str(path), "--endpoint", ENDPOINT)
        return f"submitted a batch of {self.lines} lines"

    def record(self, stage: str) -> None:
        """Record the progress at the end of a stage.

        Raises:
            LocalError: the batch process does not answer.
        """
        if not self.batch_id:
            return
        done, failed = self.counts()
        self.seen.append(Seen(stage, time.time(), done, failed, self._refused()))

    def counts(self) -> tuple[int, int]:
        """Return how many lines are done, and how many failed.

        Raises:
            LocalError: the batch process does not answer.
        """
        counts = json.loads(self._command("status", self.batch_id, "--json"))["request_counts"]
        return counts["completed"], counts["failed"]

    def cancel(self) -> None:
        """Cancel the batch.

        Raises:
            LocalError: it has ended, or the batch process does not answer.
        """
        self._command("cancel", self.batch_id)

    def end(self, samples: Sequence[Sample]) -> list[str]:
        """Wait for the end, read the results, and return the batch's part of the report.

        Raises:
            LocalError: the batch did not complete, or a line has not exactly one result.
        """
        self._command("status", self.batch_id, "--watch", "--json", timeout_s=END_TIMEOUT_S)
        self.record("end")
        fetched = json.loads(
            self._command("fetch", self.batch_id, "--out", str(self.folder), "--json")
        )
        output, errors = (
            [] if fetched[name] is None else ids_of(Path(fetched[name]))
            for name in ("output_file", "error_file")
        )
        check_results(output, errors, self.lines)
        return report(self.seen, samples, len(output), len(errors))

    def _refused(self) -> int | None:
        found = 0
        for pod in self.cluster.pods(self.namespace, SELECTOR):
            name = pod["metadata"]["name"]
            path = f"/api/v1/namespaces/{self.namespace}/pods/{name}:{ADMIN_PORT}/proxy/metrics"
            try:
                text = self.cluster.kubectl("get", "--raw", path)
            except CommandError:
                return None  # a NetworkPolicy keeps the API server out
            found += sum(int(float(value)) for value in REFUSED.findall(text))
        return found

    def _command(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run `fleetkeeper batch` as a client does; return its standard output."""
        given = {"FLEETKEEPER_URL": self.url, "FLEETKEEPER_API_KEY": self.key}
        return fleetkeeper("batch", *arguments, timeout_s=timeout_s, **given)


def desired_lines(model: str, lines: int = LINES) -> list[str]:
    """Return the lines of the input file."""
    body = {"model": model, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    return [
        json.dumps(
            {
                "custom_id": id_of(number),
                "method": "POST",
                "url": ENDPOINT,
                "body": {**body, "prompt": f"The queue has {number} lines"},
            }
        )
        for number in range(lines)
    ]


def id_of(number: int) -> str:
    """Return the custom_id of a line."""
    return f"line-{number:05}"


def ids_of(path: Path) -> list[str]:
    """Return the custom_id of each line of a file with results."""
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def check_results(output: Sequence[str], errors: Sequence[str], lines: int = LINES) -> None:
    """Check that each line has one result, and that both files have the order of the input.

    Raises:
        LocalError: they do not.
    """
    expected = [id_of(number) for number in range(lines)]
    if sorted([*output, *errors]) != expected:
        raise LocalError(
            f"batch: {len(output)} and {len(errors)} results, "
            f"of {len({*output, *errors})} different lines of {lines}"
        )
    if list(output) != sorted(output) or list(errors) != sorted(errors):
        raise LocalError("batch: the results have not the order of the input")


def report(seen: Sequence[Seen], samples: Sequence[Sample], done: int, failed: int) -> list[str]:
    """Return the lines of the report: the batch at the end of each stage, beside realtime requests."""
    realtime = [sample for sample in samples if sample.arrival.tier == "realtime"]
    first = {
        row.name: row.first_token_p95_s for row in summarise(realtime, lambda s: s.arrival.phase)
    }
    lines = [
        f"{'until the end of':20}{'done':>6}{'failed':>8}{'refused':>9}{'realtime TTFT p95 s':>21}"
    ]
    for stage in seen:
        first_token_s = first.get(stage.stage)
        lines.append(
            f"{stage.stage:20}{stage.done:6}{stage.failed:8}"
            f"{'-' if stage.refused is None else stage.refused:>9}"
            f"{'-' if first_token_s is None else format(first_token_s, '.2f'):>21}"
        )
    return [
        *lines,
        f"{done + failed} lines: {done} done, {failed} failed. Each has one result, in the order of the input.",
        "refused: answered with 429 or 503 and sent again, which counts as no attempt.",
    ]
