"""The run as Prometheus saw it."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from dataclasses import dataclass

from fleetkeeper_local.errors import LocalError

STEP_S = 2
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name, and (seconds after the start, value) pairs."""

    name: str
    points: tuple[tuple[float, float], ...]


def queries(namespace: str, service: str) -> dict[str, str]:
    """PromQL by panel; a label `line` names the lines of a panel."""
    pods = f'{{namespace="{namespace}",inference_service="{service}"}}'
    own = f'{{inference_service="{service}"}}'
    wait, batch = "fleetkeeper_queue_wait_seconds", "fleetkeeper_batch_time_seconds"
    return {
        "arrivals": f"sum by (tier) (rate(fleetkeeper_arrivals_total{pods}[10s]))",
        "queue wait": f"sum by (tier) (rate({wait}_sum{pods}[10s])) / sum by (tier) (rate({wait}_count{pods}[10s]))",
        "batch time": f"sum(rate({batch}_sum{pods}[10s])) / sum(rate({batch}_count{pods}[10s]))",
        "limits": f'avg by (kind) (fleetkeeper_limit_sequences{{namespace="{namespace}",inference_service="{service}",kind=~"wanted|effective"}})',
        "replicas": f"max by (kind) (fleetkeeper_decision_replicas{own})",
        "breakers": f"max by (breaker) (fleetkeeper_breaker_state{own})",
        "objective queue wait": f"max(fleetkeeper_objective_queue_wait_seconds{own})",
        "objective batch time": f"max(fleetkeeper_objective_batch_time_seconds{own})",
    }


def read_series(url: str, query: str, start_s: float, end_s: float) -> list[Series]:
    """A range query; points that are not numbers are left out.

    Raises:
        LocalError: Prometheus does not answer, or refuses the query.
    """
    arguments = {"query": query, "start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": STEP_S}
    address = f"{url}/api/v1/query_range?{urllib.parse.urlencode(arguments)}"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:  # noqa: S310 - the given Prometheus
            document = json.load(answer)
    except OSError as error:
        raise LocalError(f"Prometheus at {url} does not answer: {error}") from error
    return [
        Series(
            " ".join(str(value) for value in row["metric"].values()),
            tuple(
                (float(at_s) - start_s, float(text))
                for at_s, text in row["values"]
                if text not in {"NaN", "+Inf", "-Inf"}
            ),
        )
        for row in document["data"]["result"]
    ]
