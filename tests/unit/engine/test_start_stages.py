"""The stages of a start: from the workers, the API server and the first token, never from a log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetkeeper_engine.in_vllm import plugin
from fleetkeeper_engine.shm.layout import LoadBlock
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.supervisor.start_stages import StartTimes, stage_seconds


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (StartTimes(10.0), {"weights": 90.0}),
        (StartTimes(10.0, 40.0), {"weights": 30.0, "load": 60.0}),
        (StartTimes(10.0, 40.0, 70.0), {"weights": 30.0, "load": 30.0, "warm_up": 30.0}),
        (StartTimes(10.0, 40.0, 70.0, 75.0), {"weights": 30.0, "load": 30.0, "warm_up": 5.0}),
        (StartTimes(10.0, None, 70.0, 75.0), {"weights": 60.0, "warm_up": 5.0}),
    ],
)
def test_a_stage_appears_when_it_begins_and_the_last_one_grows(
    times: StartTimes, expected: dict[str, float]
) -> None:
    """At 100 s. Without the workers' signal, two stages are one."""
    assert stage_seconds(times, 100.0) == expected


def test_the_model_is_loaded_when_every_rank_says_so(tmp_path: Path) -> None:
    """The slowest rank decides."""
    region = Region.create(tmp_path / "region", ranks=2)
    assert region.all_loaded() is None
    region.write_load(1, LoadBlock(7.0))
    assert region.all_loaded() is None
    region.write_load(0, LoadBlock(5.0))
    assert region.all_loaded() == 7.0
    with pytest.raises(ValueError, match="there is no rank 2"):
        region.write_load(2, LoadBlock(5.0))


class Worker:
    """A vLLM worker on CPU, which gets its device before its model."""

    rank = 0
    device = None
    calls = 0

    def init_device(self) -> None:
        self.device = SimpleNamespace(type="cpu", index=None)

    def load_model(self, *, load_dummy_weights: bool = False) -> str:
        self.calls += 1
        return f"loaded {load_dummy_weights}"


def test_a_worker_reports_when_load_model_has_returned(region: Region) -> None:
    """On any device; the arguments and the result stay vLLM's."""

    class Wrapped(Worker):
        pass

    plugin.wrap(Wrapped)
    worker = Wrapped()
    worker.init_device()
    assert region.all_loaded() is None
    assert worker.load_model(load_dummy_weights=True) == "loaded True"
    assert worker.calls == 1
    assert region.all_loaded() is not None


def test_a_worker_without_load_model_starts_all_the_same(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version of vLLM only costs the detail."""

    class Unknown:
        rank = 0
        device = None

        def init_device(self) -> str:
            return "initialised"

    plugin.wrap(Unknown)
    assert Unknown().init_device() == "initialised"
    assert region.all_loaded() is None
    assert "the time of the load is not reported" in caplog.text
