"""The console keeps the last state and figures, whatever the API server does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fleetkeeper.console.documents import fleet_document, service_document
from fleetkeeper.console.samples import POINTS, SERIES, Sampler, Samples
from fleetkeeper.fleet.explanation import decision_rows, evidence_rows, trouble_rows
from fleetkeeper.fleet.source import Fleet
from tests.support.console.console_fleet import Recorded, chat_key, fleet_at, samples_until

NOW = 1_790_000_000.0


def test_the_ring_is_bounded_and_all_series_have_the_length_of_the_times() -> None:
    samples = samples_until(NOW, POINTS + 20)
    times, series = samples.series(chat_key())
    assert len(times) == POINTS
    assert times[-1] == NOW
    assert set(series) == set(SERIES)
    assert {len(values) for values in series.values()} == {POINTS}
    assert series["wanted"][-1] == 5.0


def test_a_service_that_appears_late_is_unknown_before_and_one_that_is_gone_has_no_ring() -> None:
    samples = Samples()
    fleet = fleet_at(NOW, NOW)
    without = Fleet([item for item in fleet.services if item["metadata"]["name"] != "chat"], {})
    samples.add(without, NOW - 5)
    samples.add(fleet, NOW)
    assert samples.series(chat_key())[1]["ready"] == [None, 5.0]
    samples.add(without, NOW + 5)
    assert samples.series(chat_key())[1] == {}
    assert service_document(samples, chat_key())["service"] is None


def test_a_failure_keeps_the_data_makes_a_gap_and_is_forgotten() -> None:
    samples = samples_until(NOW, 2)
    before = fleet_document(samples)
    samples.fail("cannot list InferenceServices: 403 Forbidden", NOW + 5)
    after = fleet_document(samples)
    assert after == {**before, "problem": "cannot list InferenceServices: 403 Forbidden"}
    assert samples.series(chat_key())[1]["ready"] == [5.0, 5.0, None]
    samples.add(fleet_at(NOW + 10, NOW + 10), NOW + 10)
    assert fleet_document(samples)["problem"] == ""


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (RuntimeError("cannot list: 403 Forbidden\nmore"), "cannot list: 403 Forbidden"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_sampler_shows_a_problem_of_any_kind(problem: Exception, text: str) -> None:
    samples = Samples()
    Sampler(Recorded(NOW, problem), samples, None, 5.0).sample()
    assert fleet_document(samples) == {"taken": None, "remark": "", "problem": text, "services": []}


def test_the_sampler_continues_after_a_problem_until_it_ends() -> None:
    answers: Iterator[Recorded] = iter([Recorded(NOW, OSError("away")), Recorded(NOW)])
    asked = threading.Semaphore(0)

    class Changing:
        def read_fleet(self, namespace: str | None) -> Fleet:
            assert namespace == "team-b"
            asked.release()
            return next(answers, Recorded(NOW)).read_fleet(namespace)

    samples = Samples()
    sampler = Sampler(Changing(), samples, "team-b", 0.01)
    sampler.start()
    for _ in range(3):
        assert asked.acquire(timeout=60)
    sampler.end()
    sampler.join(60)
    assert not sampler.is_alive()
    document = fleet_document(samples)
    assert document["problem"] == ""
    assert {row["namespace"] for row in document["services"]} == {"team-b"}


def test_a_row_has_what_decides_and_what_limits() -> None:
    rows = {row["name"]: row for row in fleet_document(samples_until(NOW, 1))["services"]}
    tones = {name: row["tone"] for name, row in rows.items()}
    assert tones == {
        "chat": "good", "embed": "good", "summarize": "good", "translate": "good",
        "code": "warn", "rerank": "warn", "new": "warn", "vision": "bad",
    }  # fmt: skip
    code = rows["code"]
    assert (code["limitedBy"], code["breaker"], code["breakerTone"]) == (
        "GPUBudget",
        "batch open",
        "bad",
    )
    assert code["queueWait"]["broken"]
    assert code["message"].startswith("The load needs 6 replicas")
    assert rows["new"]["message"] == "The operator has written no condition yet."
    assert rows["vision"]["ready"] == "InsufficientGPU"
    assert (rows["chat"]["readyReplicas"], rows["chat"]["wanted"], rows["chat"]["maxReplicas"]) == (
        "5",
        "5",
        8,
    )


def test_a_service_is_explained_in_the_words_of_explain() -> None:
    samples = samples_until(NOW, 1)
    for key, view in samples.snapshot.views.items():
        service = service_document(samples, key)["service"]
        explained = [list(row) for row in decision_rows(view)]
        breakers = [[row["title"], row["text"]] for row in service["breakers"]]
        assert sorted(service["state"] + breakers) == sorted(explained)
        assert service["measurements"] == [list(row) for row in evidence_rows(view)]
        assert service["problems"] == [list(row) for row in trouble_rows(view)]
        assert [row["text"] for row in service["changes"]] == [
            c.in_words() for c in view.changes[::-1]
        ]


def test_tones_of_breakers_conditions_and_replicas() -> None:
    samples = samples_until(NOW, 1)
    code = service_document(samples, ("team-b", "code"))["service"]
    assert [row["tone"] for row in code["breakers"]] == ["good", "good", "bad"]
    conditions = {row["type"]: row["tone"] for row in code["conditions"]}
    assert (conditions["Ready"], conditions["ScalingLimited"]) == ("good", "warn")
    vision = service_document(samples, ("team-b", "vision"))["service"]
    assert [row["tone"] for row in vision["replicaStates"]] == ["bad", "good"]
    assert vision["replicaStates"][0]["stageText"] == "The pod waits for a node."


@pytest.mark.parametrize("reason", ["Asleep", "NeverStarted"])
def test_a_service_that_sleeps_is_good_and_named_so(reason: str) -> None:
    fleet = fleet_at(NOW, NOW)
    chat = next(item for item in fleet.services if item["metadata"]["name"] == "chat")
    is_new = reason == "NeverStarted"
    chat["status"]["sleep"] = {"number": 1, "state": "Asleep", "neverStarted": is_new}
    chat["status"]["conditions"][1].update(status="False", reason=reason)
    samples = Samples()
    samples.add(fleet, NOW)
    document = service_document(samples, chat_key())["service"]
    assert (document["ready"], document["tone"], document["problems"]) == (reason, "good", [])
    assert {row["tone"] for row in document["conditions"]} == {"good"}
