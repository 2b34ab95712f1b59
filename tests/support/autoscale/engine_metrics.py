"""The metrics of a modelled engine as text, as a pod's control port would expose them."""

from __future__ import annotations

from collections.abc import Iterator

from fleetkeeper.adapters.exposition import ContractLines, parse_text
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import Latencies, PodSample, StartSeconds
from fleetkeeper.autoscale.signals.series_map import PLACES
from fleetkeeper_contract.step_terms import StepSums

LABEL_OF = {
    "effective": "kind", "applied": "kind", "decode": "step_class", "prefill": "step_class",
    "realtime": "tier", "standard": "tier", "batch": "tier", "": "",
    "weights": "stage", "load": "stage", "warm_up": "stage",
}  # fmt: skip


def metrics_series(sample: PodSample, edges: Edges) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of one series for every place of the table, and of some others.

    Summed places (running, arrivals_squared) stand in the first tier's series.
    """
    records = {
        "counters": sample.counters,
        "gauges": sample.gauges,
        "decode": sample.decode or StepSums(),
        "prefill": sample.prefill or StepSums(),
        "latencies": sample.latencies or Latencies(),
        "start": sample.start or StartSeconds(),
    }
    seen: set[tuple[str, int]] = set()
    for (name, value), (record, index) in PLACES.items():
        number = 0.0 if (record, index) in seen else float(records[record][index])
        seen.add((record, index))
        labels = {LABEL_OF[value]: value} if value else {}
        if name.endswith("_bucket"):
            edge = edges.queue_wait_s if "queue_wait" in name else edges.batch_time_s
            yield name, {**labels, "le": f"{edge / 2}"}, number / 2
            labels = {**labels, "le": f"{edge}"}
        yield name, labels, number


def metrics_text(sample: PodSample, edges: Edges) -> str:
    """The exposition of what `sample` holds, and of something that is not ours."""
    lines = ["# HELP vllm:something Else.", "# TYPE vllm:something gauge", "vllm:something 1.0"]
    for name, labels, number in metrics_series(sample, edges):
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        lines.append(f"{name}{{{inside}}} {number}" if inside else f"{name} {number}")
    return "\n".join(lines) + "\n"


def parse_sample(pod: str, now: float, body: bytes, edges: Edges) -> PodSample | None:
    """The sample in a whole response, as the operator reads it; None if there is no usable one."""
    lines = ContractLines()
    try:
        lines.feed(body)
        text = lines.text()
    except ValueError:
        return None
    return parse_text(pod, now, text, edges)
