"""The contract of an engine, on vLLM. `tests/simulated/test_contract.py`: on a simulated one."""

from __future__ import annotations

import pytest

from tests.support.engine.engine_contract import AnswersContract, StreamsContract
from tests.support.engine.engine_contract_control import ControlContract, EndsContract
from tests.support.engine.engine_contract_errors import ErrorsContract
from tests.support.engine.supervised_engine import RunningEngine, StartEngine

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def own_engine(start: StartEngine) -> RunningEngine:
    """A ready engine of the test's own, which it may end."""
    found = start()
    found.wait_ready()
    return found


class TestAnswers(AnswersContract):
    """Whole answers."""


class TestStreams(StreamsContract):
    """Streamed answers."""


class TestErrors(ErrorsContract):
    """Refused requests."""


class TestControl(ControlContract):
    """Tiers, limits, metrics and usage."""


@pytest.mark.exhaustive
class TestEnds(EndsContract):
    """The ends of an engine: each takes a start of its own. Others: `test_drain.py`, `test_serve.py`."""
