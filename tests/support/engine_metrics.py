"""The metrics of a modelled engine as text, as a pod's control port would expose them."""

from __future__ import annotations

from fleetkeeper.plan.control.exposed import PLACES, Edges
from fleetkeeper.plan.control.samples import PodSample, StepSums

LABEL_OF = {
    "effective": "kind", "applied": "kind", "decode": "step_class", "prefill": "step_class",
    "realtime": "tier", "standard": "tier", "batch": "tier", "": "",
}  # fmt: skip


def metrics_text(sample: PodSample, edges: Edges) -> str:
    """Exposition of what `sample` holds: one series for every place of the table, and some others.

    Summed places (running, arrivals_squared) stand in the first tier's series.
    """
    records = {
        "counters": sample.counters,
        "gauges": sample.gauges,
        "decode": sample.decode or StepSums(),
        "prefill": sample.prefill or StepSums(),
    }
    lines, seen = (
        ["# HELP vllm:something Else.", "# TYPE vllm:something gauge", "vllm:something 1.0"],
        set(),
    )
    for (name, value), (record, index) in PLACES.items():
        number = 0.0 if (record, index) in seen else float(records[record][index])
        seen.add((record, index))
        labels = [f'{LABEL_OF[value]}="{value}"'] if value else []
        if name.endswith("_bucket"):
            edge = edges.queue_wait_s if "queue_wait" in name else edges.batch_time_s
            half = ",".join([*labels, f'le="{edge / 2}"'])
            lines.append(f"{name}{{{half}}} {number / 2}")
            labels = [*labels, f'le="{edge}"']
        tail = "{" + ",".join(labels) + "}" if labels else ""
        lines.append(f"{name}{tail} {number}")
    return "\n".join(lines) + "\n"
