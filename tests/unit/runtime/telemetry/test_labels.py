"""Labels of exported metrics stay what they are in a scrape that adds labels of the target."""

from __future__ import annotations

import pytest

from fleetkeeper.runtime.telemetry.service_series import SERVICE_LABELS
from fleetkeeper_engine.supervisor.control_api.metric_table import METRICS
from reference_metrics import SERVICE_METRICS, operator_metrics

TARGET = {"namespace", "pod", "container", "endpoint", "service", "job", "instance", "node"}
"""Labels that discovery adds: with `honor_labels: false`, Prometheus renames ours to `exported_...`."""
OURS: dict[str, set[str]] = {
    **{metric.name: set(metric.labels) for metric in METRICS},
    **{metric.name: set(metric.labels) for metric in operator_metrics()},
    **{name: {*SERVICE_LABELS, *labels} for name, (labels, _) in SERVICE_METRICS.items()},
}


@pytest.mark.parametrize("name", sorted(OURS))
def test_no_label_of_a_metric_is_one_of_the_scraped_target(name: str) -> None:
    assert not OURS[name] & TARGET
