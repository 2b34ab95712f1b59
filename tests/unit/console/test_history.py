"""The history of a service: one query on a grid that stays, asked once per step, for known services alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import ClientSession, CookieJar

from fleetkeeper.commands.fleet.prometheus_history import HistoryError
from fleetkeeper.console.history import HOURS, POINTS, QUERIES, History, Span, marks_of, query_text
from fleetkeeper.console.server import serving
from fleetkeeper.console.session import Session
from tests.support.console.console_fleet import chat_key, samples_until

NOW = 1_790_000_000.0


@dataclass
class Recorded:
    """A Prometheus with one value in each series, at the end of the range."""

    problem: str = ""
    value: str = "7"
    asked: list[str] = field(default_factory=list)

    def range(
        self, query: str, begin: float, end: float, step_s: float
    ) -> Sequence[Mapping[str, Any]]:
        """Answer, or raise."""
        assert end - begin == POINTS * step_s
        self.asked.append(query)
        if self.problem:
            raise HistoryError(self.problem)
        return [
            {"metric": {"series": name, "subject": "replicas"}, "values": [[end, self.value]]}
            for name in QUERIES
        ]


def test_points_stay_where_they_are_until_the_next_step() -> None:
    for hours in HOURS:
        one, same = (
            Span.until(NOW, hours),
            Span.until(NOW + 0.9 * Span.until(NOW, hours).step_s, hours),
        )
        assert set(one.times()[1:]) <= {*one.times(), *same.times()}
        assert {at % one.step_s for at in one.times()} == {0.0}
        assert len(one.times()) == POINTS + 1
        assert NOW - one.step_s < one.end <= NOW


def test_values_are_in_their_place_and_no_number_is_none() -> None:
    span = Span.until(NOW, 1)
    values = [(span.begin, "1"), (span.begin + 2 * span.step_s, "NaN"), (span.end, "2.00001")]
    found = span.on_grid([*values, (span.end + span.step_s, "9")])
    assert found[:3] == [1.0, None, None]
    assert found[-1] == 2.0
    assert len(found) == POINTS + 1


def test_two_scrapes_in_a_row_are_in_some_window() -> None:
    """Otherwise a counter could grow between two windows."""
    for hours in HOURS:
        span = Span.until(NOW, hours)
        for offset in range(4 * int(span.step_s)):
            before = span.begin + offset
            after = before + 60
            assert any(at - span.window_s < before and after <= at for at in span.times())


def test_a_decision_has_one_mark_although_several_windows_hold_it() -> None:
    span = Span.until(NOW, 1)
    assert span.window_s == 8 * span.step_s
    held = [[span.begin + index * span.step_s, "1"] for index in (3, 4, 5, 6, 7, 8, 9, 10, 40)]
    marks = marks_of([{"metric": {"subject": "limits"}, "values": held}], span)
    assert [mark["time"] for mark in marks] == [held[0][0], held[-1][0]]
    assert {mark["what"] for mark in marks} == {"limits"}


def test_a_name_cannot_leave_its_quotes() -> None:
    text = query_text(('a"} or vector(1) #', "b\\"), Span.until(NOW, 1))
    assert text.count('namespace="a\\"} or vector(1) #", inference_service="b\\\\"') == len(QUERIES)
    assert not {"SERVICE", "ENGINES", "WINDOW"} & {
        *text.replace("[", " ").replace("{", " ").split()
    }


def test_prometheus_is_asked_once_per_step_and_again_after_a_failure() -> None:
    reader = Recorded()
    history = History(reader)
    first = history.document(chat_key(), 6, NOW)
    assert history.document(chat_key(), 6, NOW + 1) is first
    assert len(reader.asked) == 1
    assert history.document(chat_key(), 6, NOW + 90)["times"][0] == first["times"][0] + 90
    assert first["series"]["ready"][-1] == 7.0
    assert [mark["what"] for mark in first["marks"]] == ["replicas"]
    assert json.dumps(first, allow_nan=False)
    reader.problem = "Prometheus did not answer: 503"
    failed = history.document(chat_key(), 24, NOW)
    assert (failed["problem"], failed["series"]["ready"][-1]) == (reader.problem, None)
    reader.problem = ""
    assert history.document(chat_key(), 24, NOW)["problem"] == ""


@pytest.fixture
async def page() -> AsyncIterator[tuple[ClientSession, Recorded]]:
    """A browser that opened the console, and its Prometheus."""
    reader, session = Recorded(), Session()
    async with (
        serving(samples_until(NOW, 2), session, history=History(reader)) as port,
        ClientSession(
            f"http://127.0.0.1:{port}{session.prefix}/", cookie_jar=CookieJar(unsafe=True)
        ) as client,
    ):
        async with client.get(f"http://127.0.0.1:{port}{session.link}") as answer:
            assert answer.status == 200
        yield client, reader


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("namespace=team-a&name=chat&hours=6", 200),
        ("namespace=team-a&name=chat&hours=7", 400),
        ("namespace=team-a&name=chat&hours=-1", 400),
        ("namespace=team-a&name=chat", 400),
        ("namespace=team-z&name=chat&hours=6", 404),
        ("namespace=team-a&name=%22%7D&hours=6", 404),
        ("hours=6", 404),
    ],
)
async def test_only_known_services_and_ranges_reach_prometheus(
    page: tuple[ClientSession, Recorded], query: str, status: int
) -> None:
    client, reader = page
    async with client.get(f"history.json?{query}") as answer:
        assert answer.status == status
    assert len(reader.asked) == (status == 200)


async def test_without_a_prometheus_there_is_no_history() -> None:
    session = Session()
    async with (
        serving(samples_until(NOW, 2), session) as port,
        ClientSession(
            f"http://127.0.0.1:{port}{session.prefix}/", cookie_jar=CookieJar(unsafe=True)
        ) as client,
    ):
        async with client.get(f"http://127.0.0.1:{port}{session.link}"):
            pass
        async with client.get("service.json?namespace=team-a&name=chat") as answer:
            assert (await answer.json())["hours"] == []
        async with client.get("history.json?namespace=team-a&name=chat&hours=1") as answer:
            assert answer.status == 404
