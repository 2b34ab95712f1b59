"""Every query of the alerts and dashboards, asked of the node's Prometheus.

It scrapes real engines, the operator and the gateway by the annotations of their pods.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import pytest
from prometheus_api_client import PrometheusConnect
from requests import Session

from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.front_door import FrontDoor
from fleetkeeper_local.demo.installation import Installation
from fleetkeeper_local.demo.waiting_work import WaitingWork
from fleetkeeper_local.node.node import Node
from tests.support.chart.shipped_queries import (
    SELECTOR,
    annotated,
    chosen,
    judged,
    named,
    shown,
    variables,
)
from tests.support.guards import GUARD_S
from tests.support.node.service_world import steady

LIGHT_PER_S: Final = 2.0
RARE: Final = {
    "fleetkeeper_defects_total": "has a series after the first defect",
    "fleetkeeper_digest_mismatches_total": "has a series after the first apply that admission changed",
    "fleetkeeper_errors_total": "has a series after the first failed request to the API",
    "fleetkeeper_service_failed_wakes": "has a series once a service went to sleep",
    "fleetkeeper_namespace_unreadable": "only if the operator serves a list of namespaces",
    "fleetkeeper_unreadable_objects": "has a series while an object cannot be read",
}
"""Series that a healthy operator need not have."""
FAULTS: Final = ('reason="GrantsNotDemanded"', 'code=~"')
"""Selectors of alerts that have a series while a service has this reason, or after an error of the gateway."""
AT_REST: Final = "Requests not admitted"
"""The panel that is empty while every request is admitted."""
LINES: Final = 5_000
"""Of a batch, so that it has a backlog until every query had data."""

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("vllm_ahead")]


@pytest.fixture
def prometheus(node: Node) -> Iterator[PrometheusConnect]:
    """The node's Prometheus; a query that it refuses raises with its answer."""
    with Session() as session:
        yield PrometheusConnect(node.prometheus_url, session=session)


def _is_rare(query: str) -> bool:
    return any(fault in query for fault in FAULTS) or not RARE.keys().isdisjoint(named(query))


def _without_data(prometheus: PrometheusConnect, queries: dict[str, str]) -> dict[str, str]:
    """The queries that return nothing, by where they are from."""
    return {where: query for where, query in queries.items() if not prometheus.custom_query(query)}


@pytest.fixture
def backlog(work: WaitingWork) -> Iterator[None]:
    """Lines of a batch that wait for the service."""
    work.lines = LINES
    work.submit()
    yield
    work.cancel()


@pytest.mark.usefixtures("backlog")
def test_every_query_has_data_of_a_real_service(
    product: Installation, fleet: Fleet, door: FrontDoor, prometheus: PrometheusConnect
) -> None:
    """No query is refused; selectors and panels return data, but for those of rare series."""
    values = variables(fleet.namespace, fleet.name, product.namespace)
    panels, others = shown(values), chosen(values) | annotated(values) | judged()
    selectors = {
        f"{where}: {selector}": selector
        for where, query in (panels | others).items()
        for selector in SELECTOR.findall(query)
    }
    assert len(selectors) > len(panels)
    drawn = {where: query for where, query in panels.items() if AT_REST not in where}
    lacking = {where: query for where, query in (drawn | selectors).items() if not _is_rare(query)}
    key = door.create_key("queries", fleet.namespace)
    assert door.complete(key, fleet.name).status == 200
    assert door.complete(key, "unknown").status == 404
    with steady(fleet, LIGHT_PER_S, seed=12):
        end = time.monotonic() + GUARD_S

        def is_over() -> bool:
            nonlocal lacking
            lacking = _without_data(prometheus, lacking)
            return not lacking or time.monotonic() > end

        fleet.until(is_over, "data for every query")
    assert lacking == {}
    for query in (panels | selectors | annotated(values) | judged()).values():
        prometheus.custom_query(query)
