"""The contract of an engine, on a simulated one. `tests/engine/test_contract.py`: on vLLM."""

from __future__ import annotations

from tests.support.engine.engine_contract import AnswersContract, StreamsContract
from tests.support.engine.engine_contract_control import ControlContract, EndsContract
from tests.support.engine.engine_contract_errors import ErrorsContract


class TestAnswers(AnswersContract):
    """Whole answers."""


class TestStreams(StreamsContract):
    """Streamed answers."""


class TestErrors(ErrorsContract):
    """Refused requests."""


class TestControl(ControlContract):
    """Tiers, limits, metrics and usage."""


class TestEnds(EndsContract):
    """The ends of an engine."""
