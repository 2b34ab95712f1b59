"""The contract of an engine holds through a router: no field is lost on the way, and no frame."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.simulated.conftest import simulated_engine
from tests.support.engine.engine_contract import AnswersContract, StreamsContract
from tests.support.engine.engine_contract_control import ControlContract
from tests.support.engine.engine_contract_errors import ErrorsContract
from tests.support.engine.router_world import Routed


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A simulated engine behind a router."""
    with (
        simulated_engine(tmp_path_factory) as engine,
        closing(Routed(engine, tmp_path_factory.mktemp("router"))) as routed,
    ):
        yield routed


class TestAnswers(AnswersContract):
    """Whole answers."""


class TestStreams(StreamsContract):
    """Streamed answers."""


class TestErrors(ErrorsContract):
    """Refused requests."""


class TestControl(ControlContract):
    """Tiers, limits, metrics and usage."""
