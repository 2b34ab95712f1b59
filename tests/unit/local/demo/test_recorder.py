"""The recorder keeps what the loop decided for longer than the status does, and survives silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetkeeper.fleet.source import Fleet, FleetError
from fleetkeeper.fleet.view import Gauges, ServiceKey
from fleetkeeper_local.demo import recorder as module
from fleetkeeper_local.demo.recorder import Recorder

pytestmark = pytest.mark.exhaustive

GAUGES: dict[ServiceKey, Gauges] = {("a", "tiny"): {("signal_waiting", ()): 3.0}}


def _service(*decisions: dict[str, Any], name: str = "tiny") -> dict[str, Any]:
    return {
        "metadata": {"namespace": "a", "name": name},
        "status": {"readyReplicas": 2, "decisions": list(decisions)},
    }


def _decision(second: int) -> dict[str, str]:
    return {"time": f"2026-01-01T00:00:{second:02}Z", "what": "replicas", "from": "1", "to": "2"}


class Source:
    """Answers observation after observation; None: the API server did not answer."""

    answers: list[Fleet | None]

    def __init__(self, *_: object, **__: object) -> None:
        self.left = list(self.answers)

    def read_fleet(self, namespace: str | None) -> Fleet:
        assert namespace == "a"
        answer = self.left.pop(0) if self.left else None
        if answer is None:
            raise FleetError("away")
        return answer


def _recorder(monkeypatch: pytest.MonkeyPatch, *answers: Fleet | None) -> Recorder:
    class Given(Source):
        pass

    Given.answers = list(answers)
    monkeypatch.setattr(module, "FleetSource", Given)
    return Recorder(Path("kubeconfig"), "system", "a", "tiny")


def test_decisions_that_left_the_status_are_kept_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The status holds ten; a run makes more. Other services' are not ours."""
    recorder = _recorder(
        monkeypatch,
        Fleet([_service(_decision(1), _decision(2))], GAUGES),
        Fleet([_service(_decision(2), _decision(3)), _service(_decision(9), name="b")], GAUGES),
    )
    recorder._observe()
    recorder._observe()
    assert [row["time"][-3:-1] for row in recorder.decisions] == ["01", "02", "03"]
    assert [observation.ready for observation in recorder.observations] == [2, 2]
    assert recorder.observations[0].gauges == GAUGES["a", "tiny"]


def test_an_api_server_that_is_silent_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: the next observation counts again. Without a leader there are no gauges."""
    recorder = _recorder(monkeypatch, None, Fleet([_service()], {}, "no measurements"))
    recorder._observe()
    assert recorder.observations == []
    recorder._observe()
    assert [dict(observation.gauges) for observation in recorder.observations] == [{}]


def test_leaving_the_block_looks_a_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was decided at the very end is in the record."""
    monkeypatch.setattr(module, "EVERY_S", 60.0)
    seen = [Fleet([_service(_decision(n))], GAUGES) for n in (1, 2)]
    with _recorder(monkeypatch, *seen) as recorder:
        pass
    assert recorder.decisions
    assert not recorder._thread.is_alive()
