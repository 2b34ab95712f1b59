"""Every alert fires when it should and only then, by promtool; the chart makes them when they are enabled."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from fleetkeeper_local.control_plane.programs import program_path
from tests.support.chart.helm_chart import HelmError, rendered
from tests.support.chart.shipped_queries import RULES, alerts, named

SERVICE: Final = 'service_namespace="team-a", inference_service="chat"'
OF_OPERATOR: Final = f'namespace="fleetkeeper-system", pod="op-0", {SERVICE}'
ENGINE: Final = 'namespace="team-a", inference_service="chat", pod="chat-0"'
OPERATOR: Final = 'namespace="fleetkeeper-system", pod="op-0"'
GATEWAY: Final = 'namespace="fleetkeeper-system", pod="gateway-0"'
SECOND_GATEWAY: Final = 'namespace="fleetkeeper-system", pod="gateway-1"'
OF_BATCH: Final = f'namespace="fleetkeeper-system", pod="batch-0", {SERVICE}'
USAGE: Final = 'namespace="fleetkeeper-system", pod="usage-0"'
LOST: Final = 'service="team-a/chat"'
BATCH: Final = 'namespace="fleetkeeper-system", pod="batch-0"'
ANSWERED: Final = 'service="team-a/chat", tier="standard", status="200"'
OPEN_ENGINES: Final = 'type="Degraded", reason="GrantsNotDemanded"'
REST: Final[dict[str, str]] = {
    f"fleetkeeper_leader{{{OPERATOR}}}": "1x400",
    'fleetkeeper_leader{namespace="fleetkeeper-system", pod="op-1"}': "0x400",
    f"fleetkeeper_tick_seconds_sum{{{OPERATOR}}}": "0+1.5x400",
    f"fleetkeeper_tick_seconds_count{{{OPERATOR}}}": "0+3x400",
    'fleetkeeper_tick_seconds_count{namespace="fleetkeeper-system", pod="op-1"}': "0x400",
    f'fleetkeeper_namespace_unreadable{{{OPERATOR}, service_namespace="team-b"}}': "0x400",
    f'fleetkeeper_breaker_state{{{OF_OPERATOR}, breaker="source"}}': "0x400",
    f'fleetkeeper_breaker_state{{{OF_OPERATOR}, breaker="control"}}': "0x400",
    f'fleetkeeper_defects_total{{{OPERATOR}, where="decide"}}': "1x400",
    f"fleetkeeper_signal_queue_wait_seconds{{{OF_OPERATOR}}}": "0.2x400",
    f"fleetkeeper_objective_queue_wait_seconds{{{OF_OPERATOR}}}": "0.5x400",
    f"fleetkeeper_signal_batch_time_seconds{{{OF_OPERATOR}}}": "0.04x400",
    f"fleetkeeper_objective_batch_time_seconds{{{OF_OPERATOR}}}": "0.05x400",
    f"fleetkeeper_pressure_ratio{{{OF_OPERATOR}}}": "0.8x400",
    f'fleetkeeper_service_condition{{{OF_OPERATOR}, type="ScalingLimited", status="true"}}': "0x400",
    f'fleetkeeper_decision_replicas{{{OF_OPERATOR}, kind="live"}}': "1x400",
    f'fleetkeeper_decision_replicas{{{OF_OPERATOR}, kind="ready"}}': "1x400",
    f"fleetkeeper_service_failed_wakes{{{OF_OPERATOR}}}": "0x400",
    f'fleetkeeper_requests_total{{{ENGINE}, tier="realtime", outcome="admitted"}}': "0+60x400",
    f'fleetkeeper_requests_total{{{ENGINE}, tier="realtime", outcome="tier_closed"}}': "0x400",
    f'fleetkeeper_requests_total{{{ENGINE}, tier="batch", outcome="tier_closed"}}': "0+90x400",
    f"fleetkeeper_hung{{{ENGINE}}}": "0x400",
    f"fleetkeeper_memory_over_cap{{{ENGINE}}}": "0x400",
    f"fleetkeeper_preemptions_total{{{ENGINE}}}": "0+1x400",
    f"fleetkeeper_batch_required_tokens_per_second{{{OF_BATCH}}}": "200x400",
    f"fleetkeeper_batch_remaining_lines{{{OF_BATCH}}}": "900x400",
    f"fleetkeeper_batch_deadline_timestamp_seconds{{{OF_BATCH}}}": "86400x400",
    f"fleetkeeper_model_batch_tokens_per_second{{{OF_OPERATOR}}}": "300x400",
    f"fleetkeeper_service_condition_reason{{{OF_OPERATOR}, {OPEN_ENGINES}}}": "0x400",
    f"fleetkeeper_grant_keys{{{OPERATOR}}}": "1x400",
    f"fleetkeeper_gateway_services_contact_age_seconds{{{GATEWAY}}}": "9x400",
    f"fleetkeeper_gateway_keys_contact_age_seconds{{{GATEWAY}}}": "9x400",
    f"fleetkeeper_gateway_requests_total{{{GATEWAY}, {ANSWERED}}}": "0+90x400",
    f'fleetkeeper_gateway_refused_total{{{GATEWAY}, code="model_not_found"}}': "0+9x400",
    f'fleetkeeper_gateway_refused_total{{{GATEWAY}, code="internal_error"}}': "0x400",
    f"fleetkeeper_gateway_limits_shared{{{GATEWAY}}}": "1x400",
    f"fleetkeeper_gateway_limits_redis_failures_total{{{GATEWAY}}}": "7x400",
    f"fleetkeeper_gateway_limits_unsettled_total{{{GATEWAY}}}": "0x400",
    f"fleetkeeper_gateway_limits_unsettled_total{{{USAGE}}}": "5x400",
    f"fleetkeeper_gateway_usage_settle_failures_total{{{USAGE}}}": "0x400",
    f"fleetkeeper_gateway_usage_lost_entries_total{{{USAGE}, {LOST}}}": "4x400",
    f"fleetkeeper_gateway_usage_read_age_seconds{{{USAGE}}}": "3x400",
    f"fleetkeeper_gateway_usage_pods_unreachable{{{USAGE}}}": "0x400",
    f"fleetkeeper_gateway_batch_queue_up{{{BATCH}}}": "1x400",
}
"""A service with one replica and its operator at rest, by series, every 15 s for 100 minutes."""
ASLEEP: Final[dict[str, str]] = {
    **{
        name: f"{values.partition('x')[0]}x40 _x400"
        for name, values in REST.items()
        if ENGINE in name
    },
    f"fleetkeeper_signal_queue_wait_seconds{{{OF_OPERATOR}}}": "0.2x40 0x400",
    f"fleetkeeper_signal_batch_time_seconds{{{OF_OPERATOR}}}": "0.04x40 0x400",
    f"fleetkeeper_pressure_ratio{{{OF_OPERATOR}}}": "0.8x40 0x400",
    f'fleetkeeper_decision_replicas{{{OF_OPERATOR}, kind="live"}}': "1x40 0x240 1x400",
    f'fleetkeeper_decision_replicas{{{OF_OPERATOR}, kind="ready"}}': "1x40 0x260 1x400",
    f"fleetkeeper_service_failed_wakes{{{OF_OPERATOR}}}": "0x250 1x30 0x400",
    f"fleetkeeper_model_batch_tokens_per_second{{{OF_OPERATOR}}}": "300x40 _x260 300x400",
    f'fleetkeeper_gateway_refused_total{{{GATEWAY}, code="service_asleep"}}': "0+30x400",
    f'fleetkeeper_gateway_refused_total{{{GATEWAY}, code="service_waking"}}': "0+30x400",
}
"""The series that differ for a service that sleeps after 10 minutes and wakes after 70, its first start in vain."""


@dataclass(frozen=True)
class Case:
    """Series that differ from rest, and what the alert does at a time."""

    alert: str
    why: str
    series: dict[str, str | None]
    """None: the series does not exist."""
    at: str
    fired: tuple[str, ...]
    """The labels of each firing alert; none if it is quiet."""


TEAM_A: Final = (SERVICE,)
NEVER_LISTED: Final = "NaN " * 400
GATEWAY_GONE: Final[dict[str, str | None]] = {
    name: None for name in REST if name.startswith("fleetkeeper_gateway_") and GATEWAY in name
}
CHAT: Final = ('namespace="team-a", inference_service="chat"',)
CASES: Final = (
    Case(
        "FleetkeeperOperatorDown",
        "no operator",
        {name: None for name in REST if name.startswith("fleetkeeper_leader")},
        "6m",
        ("",),
    ),
    Case(
        "FleetkeeperNoLeader",
        "two standbys",
        {f"fleetkeeper_leader{{{OPERATOR}}}": "0x400"},
        "3m",
        ('namespace="fleetkeeper-system"',),
    ),
    Case(
        "FleetkeeperNoLeader",
        "a change of leader",
        {f"fleetkeeper_leader{{{OPERATOR}}}": "1x3 0x3 1x400"},
        "2m",
        (),
    ),
    Case(
        "FleetkeeperTicksLate",
        "8 s each",
        {f"fleetkeeper_tick_seconds_sum{{{OPERATOR}}}": "0+24x400"},
        "16m",
        (OPERATOR,),
    ),
    Case(
        "FleetkeeperTicksLate",
        "the leader's stopped",
        {f"fleetkeeper_tick_seconds_count{{{OPERATOR}}}": "7x400"},
        "16m",
        (OPERATOR,),
    ),
    Case(
        "FleetkeeperNamespaceUnreadable",
        "one namespace",
        {f'fleetkeeper_namespace_unreadable{{{OPERATOR}, service_namespace="team-b"}}': "1x400"},
        "6m",
        ('service_namespace="team-b"',),
    ),
    Case(
        "FleetkeeperPrometheusUnreadable",
        "one service",
        {f'fleetkeeper_breaker_state{{{OF_OPERATOR}, breaker="source"}}': "1x400"},
        "11m",
        ('namespace="fleetkeeper-system"',),
    ),
    Case(
        "FleetkeeperDefect",
        "the first",
        {f'fleetkeeper_defects_total{{{OPERATOR}, where="tick"}}': "_x220 1x400"},
        "57m",
        ('namespace="fleetkeeper-system", where="tick"',),
    ),
    Case(
        "FleetkeeperDefect",
        "another one",
        {f'fleetkeeper_defects_total{{{OPERATOR}, where="decide"}}': "1x120 2x400"},
        "35m",
        ('namespace="fleetkeeper-system", where="decide"',),
    ),
    Case(
        "FleetkeeperDefect",
        "long ago",
        {f'fleetkeeper_defects_total{{{OPERATOR}, where="decide"}}': "1x40 2x400"},
        "40m",
        (),
    ),
    Case(
        "FleetkeeperQueueWaitHigh",
        "twice the objective",
        {f"fleetkeeper_signal_queue_wait_seconds{{{OF_OPERATOR}}}": "1x400"},
        "16m",
        TEAM_A,
    ),
    Case(
        "FleetkeeperQueueWaitHigh",
        "until a replica is ready",
        {f"fleetkeeper_signal_queue_wait_seconds{{{OF_OPERATOR}}}": "1x40 0.2x400"},
        "16m",
        (),
    ),
    Case(
        "FleetkeeperBatchTimeHigh",
        "twice the objective",
        {f"fleetkeeper_signal_batch_time_seconds{{{OF_OPERATOR}}}": "0.1x400"},
        "16m",
        TEAM_A,
    ),
    Case(
        "FleetkeeperCannotScaleUp",
        "at the maximum",
        {
            f"fleetkeeper_pressure_ratio{{{OF_OPERATOR}}}": "1.5x400",
            f'fleetkeeper_service_condition{{{OF_OPERATOR}, type="ScalingLimited", status="true"}}': "1x400",
        },
        "16m",
        TEAM_A,
    ),
    Case(
        "FleetkeeperCannotScaleUp",
        "at the maximum, within the limits",
        {
            f'fleetkeeper_service_condition{{{OF_OPERATOR}, type="ScalingLimited", status="true"}}': "1x400"
        },
        "16m",
        (),
    ),
    Case(
        "FleetkeeperCannotScaleUp",
        "nothing limits scaling",
        {f"fleetkeeper_pressure_ratio{{{OF_OPERATOR}}}": "1.5x400"},
        "16m",
        (),
    ),
    Case(
        "FleetkeeperControlBreakerOpen",
        "half-open",
        {f'fleetkeeper_breaker_state{{{OF_OPERATOR}, breaker="control"}}': "0.5x400"},
        "11m",
        TEAM_A,
    ),
    Case(
        "FleetkeeperRealtimeShed",
        "one of four",
        {
            f'fleetkeeper_requests_total{{{ENGINE}, tier="realtime", outcome="tier_closed"}}': "0+20x400"
        },
        "11m",
        CHAT,
    ),
    Case(
        "FleetkeeperReplicasNotReady",
        "one of two",
        {f'fleetkeeper_decision_replicas{{{OF_OPERATOR}, kind="live"}}': "2x400"},
        "16m",
        TEAM_A,
    ),
    Case(
        "FleetkeeperReplicasNotReady",
        "while it starts",
        {f'fleetkeeper_decision_replicas{{{OF_OPERATOR}, kind="ready"}}': "0x40 1x400"},
        "16m",
        (),
    ),
    Case(
        "FleetkeeperReplicasNotReady",
        "a surge of a rollout",
        {f'fleetkeeper_decision_replicas{{{OF_OPERATOR}, kind="ready"}}': "2x400"},
        "16m",
        (),
    ),
    Case(
        "FleetkeeperWakeFails",
        "two in a row",
        {f"fleetkeeper_service_failed_wakes{{{OF_OPERATOR}}}": "0x40 1x40 2x400"},
        "22m",
        TEAM_A,
    ),
    Case(
        "FleetkeeperWakeFails",
        "one that is tried again",
        {f"fleetkeeper_service_failed_wakes{{{OF_OPERATOR}}}": "0x40 1x400"},
        "90m",
        (),
    ),
    Case(
        "FleetkeeperReplicasHang",
        "one for long",
        {f"fleetkeeper_hung{{{ENGINE}}}": "0x20 1x400"},
        "21m",
        CHAT,
    ),
    Case(
        "FleetkeeperReplicasHang",
        "three in turn",
        {
            f'fleetkeeper_hung{{namespace="team-a", inference_service="chat", pod="chat-{pod}"}}': f"0x{20 * pod} 1x4 0x4"
            for pod in (1, 2, 3)
        },
        "25m",
        CHAT,
    ),
    Case(
        "FleetkeeperReplicasHang",
        "one that is replaced",
        {f"fleetkeeper_hung{{{ENGINE}}}": "0x20 1x12 _x400"},
        "20m",
        (),
    ),
    Case(
        "FleetkeeperMemoryOverCap",
        "one replica",
        {f"fleetkeeper_memory_over_cap{{{ENGINE}}}": "1x400"},
        "6m",
        (ENGINE,),
    ),
    Case(
        "FleetkeeperPreemptions",
        "one of ten",
        {f"fleetkeeper_preemptions_total{{{ENGINE}}}": "0+6x400"},
        "21m",
        CHAT,
    ),
    Case(
        "FleetkeeperGatewayDown",
        "no replica",
        GATEWAY_GONE,
        "4m",
        ('namespace="fleetkeeper-system"',),
    ),
    Case(
        "FleetkeeperGatewayDown",
        "keys that cannot be listed",
        {f"fleetkeeper_gateway_keys_contact_age_seconds{{{GATEWAY}}}": NEVER_LISTED},
        "4m",
        ('namespace="fleetkeeper-system"',),
    ),
    Case(
        "FleetkeeperGatewayDown",
        "services that cannot be listed",
        {f"fleetkeeper_gateway_services_contact_age_seconds{{{GATEWAY}}}": NEVER_LISTED},
        "4m",
        ('namespace="fleetkeeper-system"',),
    ),
    Case(
        "FleetkeeperGatewayDown",
        "a second replica that starts",
        {
            f"fleetkeeper_gateway_{what}_contact_age_seconds{{{SECOND_GATEWAY}}}": NEVER_LISTED
            for what in ("keys", "services")
        },
        "30m",
        (),
    ),
    Case(
        "FleetkeeperBatchDeadlineAtRisk",
        "more than the replicas can give",
        {f"fleetkeeper_batch_required_tokens_per_second{{{OF_BATCH}}}": "400x400"},
        "16m",
        TEAM_A,
    ),
    Case(
        "FleetkeeperBatchDeadlineAtRisk",
        "until a replica is ready",
        {f"fleetkeeper_model_batch_tokens_per_second{{{OF_OPERATOR}}}": "100x40 300x400"},
        "16m",
        (),
    ),
    Case(
        "FleetkeeperBatchDeadlineAtRisk",
        "lines left after the deadline",
        {f"fleetkeeper_batch_deadline_timestamp_seconds{{{OF_BATCH}}}": "300x400"},
        "21m",
        TEAM_A,
    ),
    Case(
        "FleetkeeperBatchDeadlineAtRisk",
        "an old deadline, and no lines are left",
        {
            f"fleetkeeper_batch_deadline_timestamp_seconds{{{OF_BATCH}}}": "300x400",
            f"fleetkeeper_batch_remaining_lines{{{OF_BATCH}}}": "0x400",
        },
        "30m",
        (),
    ),
    Case(
        "FleetkeeperGatewayDown",
        "an installation without a gateway",
        {**GATEWAY_GONE, f"fleetkeeper_grant_keys{{{OPERATOR}}}": "0x400"},
        "30m",
        (),
    ),
    Case(
        "FleetkeeperGatewayErrors",
        "one of ten",
        {f'fleetkeeper_gateway_refused_total{{{GATEWAY}, code="bodies_full"}}': "0+11x400"},
        "11m",
        ('namespace="fleetkeeper-system", code="bodies_full"',),
    ),
    Case(
        "FleetkeeperGatewayErrors",
        "all, and no service answers",
        {
            f"fleetkeeper_gateway_requests_total{{{GATEWAY}, {ANSWERED}}}": None,
            f'fleetkeeper_gateway_refused_total{{{GATEWAY}, code="model_not_found"}}': None,
            f'fleetkeeper_gateway_refused_total{{{GATEWAY}, code="internal_error"}}': "0+1x400",
        },
        "11m",
        ('namespace="fleetkeeper-system", code="internal_error"',),
    ),
    Case(
        "FleetkeeperGatewayErrors",
        "one of a hundred",
        {f'fleetkeeper_gateway_refused_total{{{GATEWAY}, code="bodies_full"}}': "0+1x400"},
        "30m",
        (),
    ),
    Case(
        "FleetkeeperGatewayErrors",
        "services that do not answer",
        {f'fleetkeeper_gateway_refused_total{{{GATEWAY}, code="service_unavailable"}}': "0+99x400"},
        "30m",
        (),
    ),
    Case(
        "FleetkeeperBatchDeadlineAtRisk",
        "an operator that does not know what replicas can give",
        {
            f"fleetkeeper_batch_required_tokens_per_second{{{OF_BATCH}}}": "400x400",
            f"fleetkeeper_model_batch_tokens_per_second{{{OF_OPERATOR}}}": None,
        },
        "30m",
        (),
    ),
    Case(
        "FleetkeeperGrantsNotDemanded",
        "an old engine",
        {f"fleetkeeper_service_condition_reason{{{OF_OPERATOR}, {OPEN_ENGINES}}}": "1x400"},
        "6m",
        TEAM_A,
    ),
    Case(
        "FleetkeeperGatewayKeysStale",
        "no API server",
        {f"fleetkeeper_gateway_keys_contact_age_seconds{{{GATEWAY}}}": "0+15x400"},
        "12m",
        (GATEWAY,),
    ),
    Case(
        "FleetkeeperGatewayKeysStale",
        "an API server that restarts",
        {f"fleetkeeper_gateway_keys_contact_age_seconds{{{GATEWAY}}}": "0+15x24 0x400"},
        "12m",
        (),
    ),
    Case(
        "FleetkeeperGatewayLimitsLocal",
        "Redis gone",
        {
            f"fleetkeeper_gateway_limits_shared{{{GATEWAY}}}": "0x400",
            f"fleetkeeper_gateway_limits_redis_failures_total{{{GATEWAY}}}": "0+1x400",
        },
        "12m",
        (GATEWAY,),
    ),
    Case(
        "FleetkeeperGatewayLimitsLocal",
        "an installation without Redis",
        {
            f"fleetkeeper_gateway_limits_shared{{{GATEWAY}}}": "0x400",
            f"fleetkeeper_gateway_limits_redis_failures_total{{{GATEWAY}}}": "0x400",
        },
        "30m",
        (),
    ),
    Case(
        "FleetkeeperGatewayLimitsUnsettled",
        "Redis does not take them",
        {f"fleetkeeper_gateway_limits_unsettled_total{{{USAGE}}}": "5+2x400"},
        "16m",
        (USAGE,),
    ),
    Case(
        "FleetkeeperGatewayLimitsUnsettled",
        "too many wait",
        {f"fleetkeeper_gateway_usage_settle_failures_total{{{USAGE}}}": "0+2x400"},
        "16m",
        (USAGE,),
    ),
    Case(
        "FleetkeeperGatewayLimitsUnsettled",
        "a Redis that restarts",
        {f"fleetkeeper_gateway_limits_unsettled_total{{{USAGE}}}": "5x20 30x400"},
        "20m",
        (),
    ),
    Case(
        "FleetkeeperUsageLost",
        "the first",
        {f"fleetkeeper_gateway_usage_lost_entries_total{{{USAGE}, {LOST}}}": "_x220 5x400"},
        "57m",
        (f'namespace="fleetkeeper-system", {LOST}',),
    ),
    Case(
        "FleetkeeperBatchQueueDown",
        "no Redis",
        {f"fleetkeeper_gateway_batch_queue_up{{{BATCH}}}": "0x400"},
        "11m",
        ('namespace="fleetkeeper-system"',),
    ),
    Case(
        "FleetkeeperBatchQueueDown",
        "one of two processes",
        {
            f"fleetkeeper_gateway_batch_queue_up{{{BATCH}}}": "0x400",
            'fleetkeeper_gateway_batch_queue_up{namespace="fleetkeeper-system", pod="batch-1"}': "1x400",
        },
        "30m",
        (),
    ),
    Case(
        "FleetkeeperUsageNotRead",
        "one engine",
        {f"fleetkeeper_gateway_usage_pods_unreachable{{{USAGE}}}": "1x400"},
        "16m",
        (USAGE,),
    ),
    Case(
        "FleetkeeperUsageNotRead",
        "a loop that stopped",
        {f"fleetkeeper_gateway_usage_read_age_seconds{{{USAGE}}}": "0+15x400"},
        "25m",
        (USAGE,),
    ),
)


def _promtool(directory: Path, *documents: dict[str, Any]) -> None:
    """Run documents of unit tests; fail with promtool's report."""
    files = [directory / f"tests-{number}.yaml" for number in range(len(documents))]
    for file, document in zip(files, documents, strict=True):
        file.write_text(json.dumps(document))
    done = subprocess.run(
        [str(program_path("promtool")), "test", "rules", *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _series(series: Mapping[str, str | None]) -> list[dict[str, str]]:
    return [
        {"series": name, "values": values} for name, values in series.items() if values is not None
    ]


def _document(rules: Path, tests: list[dict[str, Any]]) -> dict[str, Any]:
    return {"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests}


def _of_alert(rule: dict[str, Any], cases: Sequence[Case], directory: Path) -> dict[str, Any]:
    """The cases of an alert, alone with the series that it reads: with all, promtool takes ten times as long."""
    file = directory / f"{rule['alert']}.yaml"
    file.write_text(json.dumps({"groups": [{"name": "alone", "rules": [rule]}]}))
    return _document(file, [_test(rule, case) for case in cases])


def _quiet(name: str, series: Mapping[str, str], *times: str) -> dict[str, Any]:
    """All alerts together with these series, of which none fires at these times."""
    expected: list[dict[str, Any]] = [
        {"expr": 'ALERTS{alertstate="firing"}', "eval_time": at, "exp_samples": []} for at in times
    ]
    test = {
        "name": name,
        "interval": "15s",
        "input_series": _series(series),
        "promql_expr_test": expected,
    }
    return _document(RULES / "alerts.yaml", [test])


def _test(rule: dict[str, Any], case: Case) -> dict[str, Any]:
    read = named(rule["expr"])
    assert all(named(name) <= read for name, values in case.series.items() if values is not None)
    rest = {name: values for name, values in REST.items() if named(name) <= read}
    own = f'alertname="{case.alert}", alertstate="firing", severity="{rule["labels"]["severity"]}"'
    return {
        "name": f"{case.alert}: {case.why}",
        "interval": "15s",
        "input_series": _series(rest | case.series),
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{case.alert}", alertstate="firing"}}',
                "eval_time": case.at,
                "exp_samples": [
                    {"labels": f"ALERTS{{{', '.join(filter(None, (own, labels)))}}}", "value": 1}
                    for labels in case.fired
                ],
            }
        ],
    }


def test_alerts_fire_when_they_should_and_are_quiet_at_rest(tmp_path: Path) -> None:
    """With the labels that tell where; at rest, all of them together."""
    cases = [
        _of_alert(rule, [case for case in CASES if case.alert == rule["alert"]], tmp_path)
        for rule in alerts()
    ]
    _promtool(tmp_path, *cases, _quiet("rest", REST, "30m", "95m"))


def test_alerts_are_quiet_while_a_service_sleeps_and_wakes(tmp_path: Path) -> None:
    _promtool(tmp_path, _quiet("asleep", REST | ASLEEP, "30m", "45m", "68m", "74m", "95m"))


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    shipped = {rule["alert"] for rule in alerts()}
    assert {case.alert for case in CASES} == shipped
    assert {case.alert for case in CASES if case.fired} == shipped


def test_a_wrong_expectation_fails(tmp_path: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    quiet = next(case for case in CASES if not case.fired)
    (rule,) = (rule for rule in alerts() if rule["alert"] == quiet.alert)
    with pytest.raises(AssertionError, match=quiet.alert):
        _promtool(tmp_path, _of_alert(rule, [replace(quiet, fired=TEAM_A)], tmp_path))


# -- the chart -------------------------------------------------------------------------------------------


def _rules(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The PrometheusRules of the chart, by name."""
    objects = rendered({"prometheus": values})
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == "PrometheusRule"}


def test_the_recording_rules_come_without_alerts() -> None:
    """An upgrade must not page anybody who has enabled the recording rules."""
    assert set(_rules({"rules": {"enabled": True}})) == {"fleetkeeper-signals"}


def test_values_of_a_release_without_alerts_are_rendered() -> None:
    """As `helm upgrade --reuse-values` passes them."""
    old = {"rules": {"enabled": True}, "alerts": None, "dashboards": None}
    assert set(_rules(old)) == {"fleetkeeper-signals"}


def test_alerts_have_a_switch_and_labels_of_their_own() -> None:
    made = _rules({"alerts": {"enabled": True, "labels": {"release": "monitoring"}}})
    assert set(made) == {"fleetkeeper-alerts"}
    rule = made["fleetkeeper-alerts"]
    assert rule["metadata"]["labels"]["release"] == "monitoring"
    assert rule["spec"] == yaml.safe_load((RULES / "alerts.yaml").read_text())


@pytest.mark.parametrize("base", ["https://git.example.com/main", "https://git.example.com/main/"])
def test_the_address_of_the_runbooks_goes_before_each_link(base: str) -> None:
    made = _rules({"alerts": {"enabled": True, "runbookBase": base}})
    links = [
        rule["annotations"]["runbook_url"]
        for group in made["fleetkeeper-alerts"]["spec"]["groups"]
        for rule in group["rules"]
    ]
    assert links == [
        f"https://git.example.com/main/{rule['annotations']['runbook_url']}" for rule in alerts()
    ]


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(HelmError, match="runbookBase"):
        rendered({"prometheus": {"alerts": {"runbookBase": "docs"}}})
