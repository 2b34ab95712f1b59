"""Wake marks in a ConfigMap, written by gateways that only know what they watch. The API server is a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from fleetkeeper_contract.sleep import (
    GATEWAY_KEY,
    GATEWAY_VALUE,
    MAX_MARKS,
    WakeMark,
    format_mark,
)
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.hold import metrics
from fleetkeeper_gateway.hold.marks import REPEAT_S, WakeMarks
from fleetkeeper_kube.credentials import Credentials
from tests.gateway.http.world import MemoryServices, asleep, service
from tests.support.gateway.gateway_api import CONFIG_MAPS, ApiStandIn, config_map
from tests.support.guards import GUARD_S

PLACE = ("fleetkeeper", "wake-marks")
CHAT = service(sleep=asleep(7))
UID = CHAT.uid
HOLDS = {GATEWAY_KEY: GATEWAY_VALUE}


class Writer:
    """Gateways with the same services, and the ConfigMap."""

    def __init__(self, api: ApiStandIn) -> None:
        self.api = api
        self.services = MemoryServices()
        self.services.set(CHAT)
        self.now = 1000.0

    @contextlib.asynccontextmanager
    async def gateway(self, ahead_s: float = 0.0) -> AsyncIterator[WakeMarks]:
        """Runs the marks of one gateway until they are watched."""
        marks = WakeMarks(
            PLACE, self.services, Credentials(self.api.url), monotonic=lambda: self.now + ahead_s
        )
        task = asyncio.create_task(marks.run())
        await until(lambda: marks.watch.synced)
        try:
            yield marks
            assert not task.done(), task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @property
    def data(self) -> dict[str, str]:
        return self.api.data(*PLACE)

    @property
    def patches(self) -> list[dict[str, str | None]]:
        return [patch for _, patch in self.api.patches]

    async def has(self, marks: WakeMarks, **expected: str) -> None:
        """Waits until the object has exactly these entries, and the gateway has seen them."""
        await until(lambda: self.data == expected and marks._data == expected)


@pytest.fixture
async def api() -> AsyncIterator[ApiStandIn]:
    """An API server with the object as the chart renders it."""
    async with ApiStandIn() as server:
        server.put(config_map(*PLACE))
        server.put(config_map("fleetkeeper", "another", {"a": "b"}))
        yield server


@pytest.fixture
def writer(api: ApiStandIn) -> Writer:
    """Gateways, none of which runs."""
    return Writer(api)


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD_S
    while not holds():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.01)


async def test_a_gateway_says_that_it_holds_once_it_knows_the_services(writer: Writer) -> None:
    writer.services.synced = False
    async with writer.gateway() as marks:
        assert writer.patches == []
        writer.services.synced = True
        await writer.has(marks, **HOLDS)
    assert writer.patches == [HOLDS]


async def test_it_says_so_again_when_the_object_lacks_it(writer: Writer) -> None:
    async with writer.gateway() as marks:
        await writer.has(marks, **HOLDS)
        writer.api.delete(CONFIG_MAPS, *PLACE)
        await until(lambda: marks._data is None)
        writer.now += REPEAT_S
        writer.api.put(config_map(*PLACE))
        await writer.has(marks, **HOLDS)
        writer.now += REPEAT_S
        writer.api.put(config_map(*PLACE, {GATEWAY_KEY: "older"}))
        await writer.has(marks, **HOLDS)
    assert writer.patches == [HOLDS] * 3


async def test_one_mark_ends_a_sleep(writer: Writer) -> None:
    """Many requests, in each tier, cause one write for each more urgent tier."""
    writer.api.put(config_map(*PLACE, HOLDS))
    async with writer.gateway() as marks:
        for tier in (Tier.BATCH, Tier.STANDARD, Tier.REALTIME):
            for _ in range(100):
                marks.want(CHAT, tier)
            expected = {**HOLDS, UID: format_mark(WakeMark(7, tier))}
            await writer.has(marks, **expected)
            writer.now += REPEAT_S
        marks.want(CHAT, Tier.STANDARD)
        assert marks._wanted == {}
    assert [patch[UID] for patch in writer.patches] == ["7.batch", "7.standard", "7.realtime"]


async def test_nothing_is_written_for_a_service_that_is_awake_or_wakes(writer: Writer) -> None:
    writer.api.put(config_map(*PLACE, HOLDS))
    async with writer.gateway() as marks:
        marks.want(service(), Tier.REALTIME)
        marks.want(service(sleep=asleep(6)), Tier.REALTIME)
        for state in ("Waking", "Swapping"):
            marks.want(service(sleep=asleep(7, state)), Tier.REALTIME)
        marks.want(service("gone", sleep=asleep(1)), Tier.REALTIME)
        other = service("other", sleep=asleep(2, "GoingToSleep"))
        writer.services.set(CHAT, other)
        marks.want(other, Tier.STANDARD)
        await writer.has(marks, **HOLDS, **{other.uid: "2.standard"})
    assert len(writer.patches) == 1


async def test_marks_that_come_soon_after_a_write_are_written_together(writer: Writer) -> None:
    writer.api.put(config_map(*PLACE, HOLDS))
    many = [service(f"s{number}", sleep=asleep(1)) for number in range(200)]
    writer.services.set(CHAT, *many)
    async with writer.gateway() as marks:
        marks.want(CHAT, Tier.STANDARD)
        await until(lambda: len(writer.patches) == 1)
        for sleeper in many:
            marks.want(sleeper, Tier.STANDARD)
        await until(lambda: len(writer.data) == 202)
    assert [len(patch) for patch in writer.patches] == [1, 200]


async def test_marks_of_gone_services_and_of_earlier_sleeps_go_with_the_next_write(
    writer: Writer,
) -> None:
    awake = service("awake")
    writer.services.set(CHAT, awake, service("older", sleep=asleep(4)))
    old = {"uid-gone": "1.batch", "uid-older": "3.batch", awake.uid: "9.batch", "x": "?"}
    writer.api.put(config_map(*PLACE, {**HOLDS, **old, UID: "what?"}))
    async with writer.gateway() as marks:
        marks.want(CHAT, Tier.STANDARD)
        await writer.has(marks, **HOLDS, **{UID: "7.standard", awake.uid: "9.batch"})
    assert len(writer.patches) == 1


async def test_a_newer_mark_than_the_known_sleep_stays(writer: Writer) -> None:
    """Another gateway may know a later status."""
    other = service("other", sleep=asleep(1))
    writer.services.set(CHAT, other)
    writer.api.put(config_map(*PLACE, {**HOLDS, UID: "8.standard"}))
    async with writer.gateway() as marks:
        marks.want(other, Tier.STANDARD)
        await writer.has(marks, **HOLDS, **{UID: "8.standard", other.uid: "1.standard"})


@pytest.mark.parametrize("data", [None, HOLDS, {**HOLDS, UID: "6.realtime"}, {UID: "7.batch"}])
async def test_a_mark_that_was_deleted_or_edited_is_written_again(
    writer: Writer, data: dict[str, str] | None
) -> None:
    """As long as requests wait, but not at once: an older state may come late from the watch."""
    async with writer.gateway() as marks:
        marks.want(CHAT, Tier.STANDARD)
        await until(lambda: writer.data.get(UID) == "7.standard" == (marks._data or {}).get(UID))
        writer.api.put(config_map(*PLACE, data))
        await until(lambda: marks._data == (data or {}))
        marks.want(CHAT, Tier.STANDARD)
        assert marks._wanted == {}
        writer.now += REPEAT_S
        marks.want(CHAT, Tier.STANDARD)
        await writer.has(marks, **HOLDS, **{UID: "7.standard"})


async def test_an_object_that_was_deleted_is_written_once_the_operator_made_it_again(
    writer: Writer,
) -> None:
    writer.api.delete(CONFIG_MAPS, *PLACE)
    async with writer.gateway() as marks:
        marks.want(CHAT, Tier.STANDARD)
        await until(lambda: len(writer.patches) >= 1)
        writer.api.put(config_map(*PLACE))
        await writer.has(marks, **HOLDS, **{UID: "7.standard"})


@pytest.mark.parametrize("status", [403, 404, 409, 422, 500])
async def test_a_write_that_fails_is_repeated_and_logged_once(
    writer: Writer, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = metrics.FAILURES._value.get()
    writer.api.put(config_map(*PLACE, HOLDS))
    writer.api.patch_status = status
    async with writer.gateway() as marks:
        marks.want(CHAT, Tier.STANDARD)
        await until(lambda: len(writer.patches) >= 3)
        assert metrics.FAILURES._value.get() - failures >= 2
        writer.api.patch_status = 200
        await writer.has(marks, **HOLDS, **{UID: "7.standard"})
    assert capsys.readouterr().out.count("wake marks cannot be written") == 1


async def test_a_wake_that_ended_is_not_written_after_failures(writer: Writer) -> None:
    writer.api.put(config_map(*PLACE, HOLDS))
    writer.api.patch_status = 500
    async with writer.gateway() as marks:
        marks.want(CHAT, Tier.STANDARD)
        await until(lambda: len(writer.patches) >= 1)
        writer.services.set(service())
        writer.api.patch_status = 200
        await until(lambda: marks._wanted == {})
    assert writer.data == HOLDS


async def test_marks_are_written_when_the_api_server_is_back(writer: Writer) -> None:
    async with writer.gateway() as marks:
        await writer.has(marks, **HOLDS)
        await writer.api.stop()
        marks.want(CHAT, Tier.STANDARD)
        await until(lambda: bool(marks._problem))
        await writer.api.start()
        await writer.has(marks, **HOLDS, **{UID: "7.standard"})


async def test_two_gateways_write_a_mark_once(writer: Writer) -> None:
    """Their clocks differ by an hour. Neither undoes what the other wrote."""
    other = service("other", sleep=asleep(2))
    writer.services.set(CHAT, other)
    async with writer.gateway() as one, writer.gateway(ahead_s=3600) as two:
        await writer.has(one, **HOLDS)
        await writer.has(two, **HOLDS)
        one.want(CHAT, Tier.STANDARD)
        expected = {**HOLDS, UID: "7.standard"}
        await writer.has(two, **expected)
        two.want(CHAT, Tier.STANDARD)
        assert two._wanted == {}
        two.want(other, Tier.REALTIME)
        expected[other.uid] = "2.realtime"
        await writer.has(one, **expected)
        await writer.has(two, **expected)
    marks = [patch for patch in writer.patches if patch != HOLDS]
    assert marks == [{UID: "7.standard"}, {other.uid: "2.realtime"}]


async def test_there_are_at_most_4096_marks(writer: Writer) -> None:
    """Marks of services that are awake go first, then the least urgent ones are not written."""
    sleepers = [service(f"s{number}", sleep=asleep(1)) for number in range(MAX_MARKS - 2)]
    awake = [service("awake-1"), service("awake-2")]
    wanted = [service(f"w{number}", sleep=asleep(1)) for number in range(4)]
    writer.services.set(*sleepers, *awake, *wanted)
    full = {sleeper.uid: "1.standard" for sleeper in (*sleepers, *awake)}
    assert len(full) == MAX_MARKS
    writer.api.put(config_map(*PLACE, {**HOLDS, **full}))
    async with writer.gateway() as marks:
        tiers = (Tier.BATCH, Tier.REALTIME, Tier.BATCH, Tier.STANDARD)
        for sleeper, tier in zip(wanted, tiers, strict=True):
            marks.want(sleeper, tier)
        await until(lambda: len(writer.patches) == 1 and marks._data == writer.data)
        del full[awake[0].uid], full[awake[1].uid]
        assert writer.data == {
            **HOLDS,
            **full,
            wanted[1].uid: "1.realtime",
            wanted[3].uid: "1.standard",
        }
        left = service("s0", sleep=asleep(2))
        writer.services.set(*sleepers[1:], *wanted, left)
        marks.want(left, Tier.REALTIME)
        await until(lambda: writer.data[left.uid] == "2.realtime")
        assert len(writer.data) == MAX_MARKS + 1
    assert len(writer.patches) == 2
