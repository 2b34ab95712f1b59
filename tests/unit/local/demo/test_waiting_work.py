"""The demo's batch, against a server that speaks the API; the play tells it when its stages end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from fleetkeeper.commands.batch.input_file import check_file
from fleetkeeper_gateway.batch import metrics as of_batch
from fleetkeeper_gateway.batch.workers.lines import Verdict
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.demo.cluster import CommandError
from fleetkeeper_local.demo.waiting_work import (
    ENDPOINT,
    LINES,
    Seen,
    WaitingWork,
    check_results,
    desired_lines,
    id_of,
    report,
)
from fleetkeeper_local.load.client import Outcome
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Arrival
from tests.support.batch.batch_api_server import KEY, BatchServer, batch_server

pytestmark = pytest.mark.exhaustive

IDS = [id_of(number) for number in range(LINES)]


def exposition() -> str:
    """What a pod of the batch process exports after some attempts."""
    (family,), with_values = of_batch.LINES.collect(), CollectorRegistry()
    lines = Counter(family.name, "Attempts.", ("outcome",), registry=with_values)
    for verdict, count in ((Verdict.OK, 90), (Verdict.REFUSED, 7), (Verdict.KEY_REFUSED, 2)):
        lines.labels(verdict.value).inc(count)
    return generate_latest(with_values).decode()


METRICS = exposition()


class Pods:
    """The cluster's pods of the batch process, and their metrics."""

    def __init__(self, metrics: str | None) -> None:
        self.metrics = metrics

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        assert namespace == "system"
        assert "gateway-batch" in selector
        return [{"metadata": {"name": name}} for name in ("a", "b")]

    def kubectl(self, *words: str) -> str:
        assert words[:2] == ("get", "--raw")
        if self.metrics is None:
            raise CommandError("no route")
        return self.metrics


@pytest.fixture
def server() -> Iterator[BatchServer]:
    with batch_server() as state:
        yield state


def work_at(server: BatchServer, folder: Path, metrics: str | None = METRICS) -> WaitingWork:
    pods: Any = Pods(metrics)
    return WaitingWork(pods, "system", server.url, KEY, "tiny", folder)


def results(ids: list[str]) -> bytes:
    return "".join(json.dumps({"custom_id": one}) + "\n" for one in ids).encode()


def test_the_lines_are_valid_and_name_the_model(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(desired_lines("tiny")))
    found = check_file(path, ENDPOINT)
    assert (found.mistakes, found.lines, found.model) == ([], LINES, "tiny")


@pytest.mark.slow
def test_a_batch_is_submitted_followed_and_read(server: BatchServer, tmp_path: Path) -> None:
    work = work_at(server, tmp_path)
    work.record("x1")
    assert work.seen == []  # before it is submitted there is nothing to see
    assert work.submit() == f"submitted a batch of {LINES} lines"
    batch = server.batches[work.batch_id]
    assert batch["endpoint"] == ENDPOINT
    batch.update(
        status="in_progress", request_counts={"total": LINES, "completed": 50, "failed": 1}
    )
    work.record("x4")
    server.files |= {"file-out": results(IDS[2:]), "file-err": results(IDS[:2])}
    batch.update(
        status="completed",
        output_file_id="file-out",
        error_file_id="file-err",
        request_counts={"total": LINES, "completed": LINES - 2, "failed": 2},
    )
    lines = work.end([])
    assert [(one.stage, one.done, one.failed, one.refused) for one in work.seen] == [
        ("x4", 50, 1, 18),
        ("end", LINES - 2, 2, 18),
    ]
    assert f"{LINES} lines: {LINES - 2} done, 2 failed" in "\n".join(lines)


@pytest.mark.slow
def test_a_batch_that_does_not_complete_ends_the_demo(server: BatchServer, tmp_path: Path) -> None:
    work = work_at(server, tmp_path, metrics=None)
    work.submit()
    server.batches[work.batch_id]["status"] = "expired"
    with pytest.raises(LocalError, match="is expired"):
        work.end([])
    work.record("x4")
    assert work.seen[0].refused is None


@pytest.mark.parametrize(
    ("output", "errors", "message"),
    [
        (IDS[1:], [], "199 and 0 results, of 199 different lines"),
        (IDS, IDS[:1], "200 and 1 results, of 200 different lines"),
        ([*IDS[1:], IDS[1]], [], "200 and 0 results, of 199 different lines"),
        ([IDS[1], IDS[0], *IDS[2:]], [], "not the order of the input"),
        (IDS[2:], [IDS[1], IDS[0]], "not the order of the input"),
    ],
)
def test_each_line_has_one_result_in_order(
    output: list[str], errors: list[str], message: str
) -> None:
    check_results(IDS[3:], IDS[:3])
    with pytest.raises(LocalError, match=message):
        check_results(output, errors)


def sample(phase: str, tier: str, first_token_s: float) -> Sample:
    arrival = Arrival(0, 0.0, phase, tier, "s", 4, 8)
    outcome = Outcome(True, "", 200, 1, 0.0, first_token_s, 1.0, 8)
    return Sample(arrival, outcome, 0.0, 0.0, 1.0)


def test_the_report_has_the_stages_beside_realtime_latencies() -> None:
    seen = [Seen("x4", 0.0, 50, 1, 18), Seen("end", 0.0, 199, 1, None)]
    samples = [sample("x4", "realtime", 0.25), sample("x4", "standard", 9.0)]
    head, surge, end, *_ = report(seen, samples, 199, 1)
    assert surge.split() == ["x4", "50", "1", "18", "0.25"]
    assert end.split() == ["end", "199", "1", "-", "-"]
    assert len(head) == len(surge) == len(end)
