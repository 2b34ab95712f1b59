"""Send a step from 80% to 240% of what one simulated engine carries to the local node: when come replicas?

    .venv/bin/python benchmarks/simulated/step.py [--seeds 7 8]

It needs root, and no other node on the machine. The operator, Prometheus, the router and the engine pods
are real; only vLLM is simulated. The service is that of `against_node.py` with one replica at least. The
steady part is long enough for a trusted step-time model, and for the end of the replicas that waits order
before there is one. Clients retry as `fleetkeeper load` does.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from against_node import HISTOGRAMS, TITLE, Measured, measure  # noqa: E402 - the paths are set above
from both_sides import SERVICE, SHAPE, edge_of, value_at, voids  # noqa: E402
from results_page import markdown_table, measured_on, write_section  # noqa: E402

from fleetkeeper_local.load.client import Patience  # noqa: E402
from fleetkeeper_local.load.schedule import Arrival, Phase, plan_arrivals  # noqa: E402

HEADING = "A threefold step on a node"
CARRIED_PER_S = 3.2
"""What one replica carries. The step-time model says 3.7; at 80% of that, chance makes requests wait too long."""
STEADY_S, STEP_S = 420.0, 180.0
CHANGES = {
    "minReplicas: 2": "minReplicas: 1",
    "scaleDownDelaySeconds: 60": "scaleDownDelaySeconds: 30",
}
"""What differs in the service. With a longer delay, replicas from before the model is trusted are still there."""


def planned(seed: int) -> tuple[Arrival, ...]:
    """Return the requests of one run."""
    phases = [
        Phase("steady", STEADY_S, 0.8 * CARRIED_PER_S),
        Phase("step", STEP_S, 2.4 * CARRIED_PER_S),
    ]
    return plan_arrivals(phases, SHAPE, seed)


def row_of(run: Measured) -> list[str]:
    """Return the row of one run; times count from the step."""
    before = value_at(run.wanted, STEADY_S)
    orders = [at_s - STEADY_S for at_s, count in run.wanted if at_s > STEADY_S and count > before]
    second = [at_s - STEADY_S for at_s, count in run.ready if at_s > STEADY_S and count > before]
    late = run.counts[HISTOGRAMS[2]]
    void = "; ".join(voids(edge_of(late, 0.99), run.busy_ratio))
    return [
        str(run.seed),
        f"{before:.0f}",
        f"{orders[0]:.0f} s" if orders else "never",
        f"{second[0]:.0f} s" if second else "never",
        f"{max(count for _, count in run.ready):.0f}",
        str(len(planned(run.seed))),
        ", ".join(f"{count} {kind}" for kind, count in run.failed.items()) or "0",
        f"{run.answers:.1%}",
        f"{run.busy_ratio:.0%}" + (f" (void: {void})" if void else ""),
    ]


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8])
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/simulated"))
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    service = args.out / "step.yaml"
    text = SERVICE.read_text()
    for old, new in CHANGES.items():
        if old not in text:
            raise SystemExit(f"{SERVICE.name} has no {old!r}, which the step changes")
        text = text.replace(old, new)
    service.write_text(text)
    rows = []
    for seed in args.seeds:
        run = measure(
            planned(seed), STEADY_S + STEP_S, seed, service=service, replicas=1, patience=Patience()
        )
        rows.append(row_of(replace(run, seed=seed)))
    section = "\n\n".join(
        [
            "    .venv/bin/python benchmarks/simulated/step.py",
            (
                f"`service.yaml` of this folder with `minReplicas: 1` and `scaleDownDelaySeconds: 30` on the local node. {0.8 * CARRIED_PER_S:.1f} requests/s for {STEADY_S:.0f} s "
                f"are about 80% of what one replica carries, then three times as many for {STEP_S:.0f} s. Clients retry up to four times. Times "
                "count from the step, read every 2 s. *Failed*: after all retries, by tier and cause. *Within*: a TTFT of at most 2 s and 50 ms per token."
            ),
            markdown_table(
                [
                    "seed",
                    "replicas before",
                    "first order",
                    "next replica ready",
                    "most ready",
                    "requests",
                    "failed",
                    "within",
                    "processor in use",
                ],
                rows,
            ),
            measured_on(),
        ]
    )
    if args.write:
        write_section(HEADING, section, HERE / "RESULTS.md", TITLE)
    print(section)


if __name__ == "__main__":
    main()
