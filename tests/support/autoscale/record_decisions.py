"""Record the decisions of seeded scenarios, to compare them before and after a change of structure.

    .venv/bin/python tests/support/autoscale/record_decisions.py /tmp/before
    # change the code
    .venv/bin/python tests/support/autoscale/record_decisions.py /tmp/after && diff -r /tmp/before /tmp/after

`ticks.jsonl` has one line a control tick: limits, admission, requests to engines, allocation, status,
events and gauges. `plans.jsonl` has one line a plan: actions, status, events and the requeue time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from fleetkeeper.autoscale import report as control_report  # noqa: E402
from fleetkeeper.autoscale.types import ControlSettings  # noqa: E402
from fleetkeeper.simulate import autoscalers  # noqa: E402
from fleetkeeper.simulate.engine import H100_70B  # noqa: E402
from tests.support.autoscale.control_cases import reported_status  # noqa: E402
from tests.support.autoscale.simulated import Case, played  # noqa: E402
from tests.support.reconcile import plan_cluster, plan_world  # noqa: E402 - found by the line above
from tests.support.reconcile.random_specs import random_spec  # noqa: E402


def plain(value: object) -> Any:
    """Return a value as JSON, without the names of classes."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {item.name: plain(getattr(value, item.name)) for item in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 9)
    return value if value is None or isinstance(value, (int, bool)) else str(value)


def burst(low: float, high: float) -> Callable[[float], float]:
    """Return a rate that is high for five minutes of every twenty."""
    return lambda t: high if 300 <= t % 1200 < 600 else low


def scenarios() -> Iterator[Case]:
    """Yield scenarios with load, faults, modes and tiers."""
    wide = ControlSettings(max_replicas=12, scale_down_delay_s=300.0)
    for seed in (1, 7):
        yield Case(1800, lambda _: 12.0, wide, H100_70B, replicas=2, seed=seed)
        yield Case(2400, burst(13, 40), wide, H100_70B, replicas=2, seed=seed)
    tiers = (0.2, 0.5, 0.3)
    narrow = dataclasses.replace(wide, max_replicas=2)
    yield Case(2400, burst(10, 60), narrow, H100_70B, replicas=1, tiers=tiers)
    yield Case(
        2400,
        lambda t: 12.0 + 8 * math.sin(t / 300),
        wide,
        H100_70B,
        replicas=2,
        metrics=lambda t: not 600 <= t < 1200,
        direct=lambda t: t < 900,
    )
    yield Case(1800, burst(5, 30), wide, replicas=2, puts=lambda t: not 400 <= t < 800)
    yield Case(1800, burst(5, 30), wide, replicas=2, pods_come=lambda t: t > 1000)
    yield Case(1800, lambda _: 10.0, wide, replicas=2, slowness=lambda t: 3.0 if t > 600 else 1.0)
    fragmented = dataclasses.replace(wide, restart_fragmented=True)
    yield Case(1800, lambda _: 8.0, fragmented, replicas=3)


def record_ticks(target: Path, cases: Iterable[Case] | None = None) -> int:
    """Write one line a tick of each scenario; return the number of ticks."""
    rows = 0
    built = control_report.build_report
    scaling = {"minReplicas": 1, "maxReplicas": 12}
    modes = (
        {"scaling": scaling},
        {"scaling": scaling, "replicas": 2},
        {"scaling": {**scaling, "mode": "Advisory"}},
    )
    worlds = [plan_cluster.settle(plan_world.new_world(**spec)) for spec in modes]
    with target.open("w") as lines:

        def build(decision: Any, allocation: Any, memory: Any, now: float) -> Any:
            nonlocal rows
            report, after = built(decision, allocation, memory, now)
            row = {
                "now": now,
                "puts": decision.puts,
                "in_force": decision.in_force,
                "admission": decision.admission,
                "replicas": (decision.replicas.value, decision.replicas.reason),
                "detail": (decision.replicas.detail, decision.limits.detail),
                "replace": decision.replace_pods,
                "allocation": report.allocation,
                "status": status_of(report),
                "events": report.events,
                "metrics": report.metrics,
            }
            if rows % 5 == 0:
                row["plans"] = [plan_with(world, report) for world in worlds]
            lines.write(json.dumps(plain(row), sort_keys=True) + "\n")
            rows += 1
            return report, after

        setattr(autoscalers, "build_report", build)  # noqa: B010 - imported there, not defined
        for number, scenario in enumerate(scenarios() if cases is None else cases):
            lines.write(f"scenario {number}\n")
            played(scenario)
        setattr(autoscalers, "build_report", built)  # noqa: B010 - as above
    return rows


def plan_with(world: plan_world.World, report: Any) -> Any:
    """Return the plan of a settled service that gets this report of the control loop."""
    return plan_world.plan_of(
        dataclasses.replace(
            world,
            allocation=report.allocation,
            control_report=report.report,
            status_written=None,
        )
    )


def status_of(result: Any) -> Any:
    """Return the report in the form of the status, with the conditions."""
    return reported_status(result.report)


def record_plans(target: Path, seeds: int = 12) -> int:
    """Write one line a plan of so many random services; return the number of plans."""
    rows = 0
    decide = plan_world.plan_of
    with target.open("w") as lines:

        def plan_of(world: Any) -> Any:
            nonlocal rows
            plan = decide(world)
            lines.write(json.dumps(plain(plan), sort_keys=True) + "\n")
            rows += 1
            return plan

        plan_world.plan_of = plan_of
        for seed in range(seeds):
            rng = random.Random(seed)
            world = plan_world.World(resource=random_service(rng))
            lines.write(f"seed {seed}\n")
            for _ in range(3):
                changed = random_service(rng)["spec"]
                behaviour = rng.choice(list(plan_world.Behaviour))
                world = dataclasses.replace(world, next_behaviour=behaviour)
                gone = dict.fromkeys(world.resource["spec"])
                world = plan_world.with_spec(world, **{**gone, **changed})
                world = plan_cluster.settle(world, 3000)
        plan_world.plan_of = decide
    return rows


def random_service(rng: random.Random) -> Any:
    """Return a random spec on the service `chat` with few replicas and a start bounded in minutes."""
    spec = {**random_spec(rng), "paused": False, "scaling": {"minReplicas": rng.randint(1, 3)}}
    spec["rollout"] = {**spec.get("rollout", {}), "startupSeconds": rng.randint(60, 900)}
    if "replicas" in spec:
        spec["replicas"] = rng.randint(0, 4)
    return plan_world.service(**spec)


def main() -> None:
    """Write both records into the directory that the command names."""
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    print("ticks", record_ticks(target / "ticks.jsonl"))
    print("plans", record_plans(target / "plans.jsonl"))


if __name__ == "__main__":
    main()
