"""The queries of one tick. Their number does not depend on the number of services.

Every label in a grouping is matched too, so that values invented by a pod are not returned: tiers,
kinds, step classes and bucket edges by their known values, namespaces by those of the fleet. The result
is one row per pod and known series.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.series_map import PLACES, SHOWN, STEP_CLASSES, STEP_TERMS
from fleetkeeper_contract import batch_metrics
from fleetkeeper_contract.tiers import TIER_LABELS

SERVICE_LABEL: Final = "inference_service"
BY: Final = "namespace, pod"
OURS: Final = f'{SERVICE_LABEL}!=""'
TIER: Final = f', tier=~"{"|".join(TIER_LABELS)}"'
KIND: Final = ', kind=~"effective|applied"'
NAMESPACES_TEXT: Final = 2_000
"""Maximum length of the namespaces in a query of the whole fleet. Longer lists are left out, because
the length of URLs is limited."""
_NAMES: Final = "|".join(
    sorted({name.removeprefix("fleetkeeper_") for name, _ in PLACES if name not in SHOWN})
)
"""Series that no decision uses are no reason to disbelieve a pod."""
_SELECTOR: Final = re.compile(
    r"""\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*"((?:[^"\\\n]|\\[\\"n])*)"\s*(?:,|$)"""
)


@dataclass(frozen=True, slots=True)
class Query:
    """A query."""

    name: str
    build: Callable[[str], str]
    """Returns the query with further matchers, each with a leading comma."""
    selector: str = ""
    required: bool = True
    """True if there is no sample without the query's result: zeros instead of counters would look
    like a restart."""
    namespace_label: str = "namespace"
    """The label with the namespace of the service."""

    def text(self, namespaces: Sequence[str] = ()) -> str:
        """Return the PromQL for these namespaces; without namespaces, for all."""
        scope = f", {self.selector}" if self.selector else ""
        if namespaces:
            scope += f', {self.namespace_label}=~"{label_value("|".join(namespaces))}"'
        return self.build(scope)


def parse_selector(text: str) -> str:
    """Return the label matchers in `text` in the form that is added to every query.

    Example: `{job="fleetkeeper-engines"}` gives `job="fleetkeeper-engines"`.

    Raises:
        ValueError: `text` is anything but a list of label matchers.
    """
    inner = text.strip()
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1].strip()
    matchers, at = [], 0
    while at < len(inner):
        found = _SELECTOR.match(inner, at)
        if found is None:
            raise ValueError(
                'must be label matchers such as job="fleetkeeper-engines", separated by commas'
            )
        matchers.append(f'{found[1]}{found[2]}"{found[3]}"')
        at = found.end()
    return ", ".join(matchers)


def label_value(value: str) -> str:
    r"""Return a label value for use in double quotes, with backslash, quote and newline escaped."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def bucket_matcher(edges: Iterable[float]) -> str:
    """Return a matcher of `le` for these edges, in both forms, "1" and "1.0": releases differ."""
    texts = {text for edge in edges for text in (f"{edge:g}", repr(float(edge)), str(edge))}
    return "|".join(sorted(text.replace(".", "\\\\.").replace("+", "\\\\+") for text in texts))


def _named(names: str, by: str = "", more: str = "") -> Callable[[str], str]:
    labels = f"{BY}, {by}" if by else BY

    def build(scope: str) -> str:
        return f'max by (__name__, {labels}) ({{__name__=~"fleetkeeper_({names})", {OURS}{more}{scope}}})'

    return build


def _times(scope: str) -> str:
    return f"max by ({BY}) (timestamp(fleetkeeper_kv_capacity_tokens{{{OURS}{scope}}}))"


def _disputed(edges: str) -> Callable[[str], str]:
    """Return the query for pods with more than one series of the same name and known labels."""
    known = (
        f', tier=~"|{"|".join(TIER_LABELS)}", kind=~"|effective|applied"'
        f', step_class=~"|{"|".join(STEP_CLASSES)}", le=~"|{edges}"'
    )

    def build(scope: str) -> str:
        return (
            f"count by ({BY}) (count by (__name__, {BY}, tier, kind, step_class, le) "
            f'({{__name__=~"fleetkeeper_({_NAMES})", {OURS}{known}{scope}}}) > 1)'
        )

    return build


def _backlog(scope: str) -> str:
    """Return the query for the backlogs of all services, and the times of their scrapes."""
    inside, names = scope.removeprefix(", "), "|".join(BACKLOG_SERIES)
    by = f"{batch_metrics.NAMESPACE_LABEL}, {batch_metrics.SERVICE_LABEL}"
    times = f"max by ({by}) (timestamp({batch_metrics.BACKLOG_TOKENS}{{{inside}}}))"
    return (
        f'max by (__name__, {by}) ({{__name__=~"{names}"{scope}}}) '
        f'or label_replace({times}, "{BACKLOG_TIME}", "1", "", "")'
    )


BACKLOG_SERIES: Final = (
    batch_metrics.BACKLOG_TOKENS,
    batch_metrics.DEADLINE,
    batch_metrics.REQUIRED_RATE,
)
BACKLOG_TIME: Final = "scraped"
"""Label of the rows whose value is the time of a scrape."""
BACKLOG: Final = "backlog"
TIMES: Final = "times"
DISPUTED: Final = "disputed"


def queries_for(
    edges: Iterable[Edges], *, step_class: str = "", selector: str = "", batch_selector: str = ""
) -> tuple[Query, ...]:
    """Return the queries of one tick, required ones first.

    They use `max by`, not `sum by`, so that no value counts twice if two jobs scrape a pod. Such a
    pod is in the result of DISPUTED. `step_class`: the step class whose sums for the step-time model
    are queried, if any. `selector`, `batch_selector`: from `parse_selector`; without the second one, no
    backlog is queried.
    """
    listed = list(edges)
    waits = bucket_matcher({edge.queue_wait_s for edge in listed})
    steps = bucket_matcher({edge.batch_time_s for edge in listed})
    required: list[tuple[str, Callable[[str], str]]] = [
        (TIMES, _times),
        ("waits", _named("queue_wait_seconds_(count|sum)", "tier", TIER)),
        (
            "wait buckets",
            _named("queue_wait_seconds_bucket", "tier, le", f'{TIER}, le=~"{waits}"'),
        ),
        ("step buckets", _named("batch_time_seconds_bucket", "le", f', le=~"{steps}"')),
        (
            "steps",
            _named(
                "batch_time_seconds_(count|sum)|kv_(capacity|resident)_tokens"
                "|(steps|schedule_calls|prompt_tokens|generation_tokens|preemptions)_total"
                # Required: an engine without this series counts as one that demands no grant.
                "|grants_demanded"
            ),
        ),
        ("arrivals", _named("arrivals(_squared)?_total", "tier", TIER)),
        ("load", _named("waiting|running|oldest_wait_seconds", "tier", TIER)),
        ("limits", _named("limit_(sequences|tokens|generation)", "kind", KIND)),
    ]
    optional: list[tuple[str, Callable[[str], str]]] = [
        (DISPUTED, _disputed(f"{waits}|{steps}")),
        (
            "memory",
            _named(
                "memory_((used|peak|fragmentation)_ratio|own)"
                "|live_limits_supported|hung|idle_seconds"
            ),
        ),
    ]
    optional.append(
        (
            "latencies",
            _named("(time_to_first_token|inter_token_latency)_seconds_(count|sum)", "tier", TIER),
        )
    )
    if step_class:
        terms, of_class = "|".join(STEP_TERMS[step_class]), f', step_class=~"{step_class}"'
        optional.append(
            ("step model", _named(f"step_model_({terms})_total", "step_class", of_class))
        )
    backlog = Query(
        BACKLOG,
        _backlog,
        batch_selector,
        required=False,
        namespace_label=batch_metrics.NAMESPACE_LABEL,
    )
    return (
        *(Query(name, build, selector) for name, build in required),
        *(Query(name, build, selector, required=False) for name, build in optional),
        *((backlog,) if batch_selector else ()),
    )
