"""CPU time of one control tick over many services: pure decisions, no I/O.

    python benchmarks/control/tick.py [--services 1000] [--pods 2] [--ticks 12]

The output has milliseconds of CPU per tick (median) and microseconds per service. Samples are those
of modelled engines under load, so every branch of a busy tick runs; idle services cost less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from random import Random

from fleetkeeper.autoscale.arbitrate import arbitrate
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.tick import decide_service
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings, PodView, PutOutcome
from fleetkeeper.common.budget import Budget
from fleetkeeper.runtime import heap
from fleetkeeper.simulate.engine import H100_8B, Engine
from fleetkeeper.simulate.requests import Request

START_S = 1_000_000.0


def scrapes(pods: int, ticks: int) -> list[tuple[PodSample, ...]]:
    """Return scrapes of `pods` loaded engines, one row per tick of 5 s."""
    random = Random(1)
    engines = [Engine(H100_8B, f"chat-{i}", START_S - 600) for i in range(pods)]
    rows, now = [], START_S
    for tick in range(ticks * 20):
        for engine in engines:
            if random.random() < 0.9:
                engine.arrive(Request(now, 1, 800, random.randint(50, 300)))
        now += 0.25
        for engine in engines:
            engine.advance(now)
        if tick % 20 == 19:
            rows.append(tuple(engine.sample(now) for engine in engines))
    return rows


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=2)
    parser.add_argument("--ticks", type=int, default=24)
    asked = parser.parse_args()
    rows = scrapes(asked.pods, asked.ticks)
    views = tuple(
        PodView(f"chat-{i}", f"uid-{i}", START_S - 700, True, START_S - 600, ip="127.0.0.1")
        for i in range(asked.pods)
    )
    settings = ControlSettings()
    memories = [ControlMemory() for _ in range(asked.services)]
    outcomes: list[tuple[PutOutcome, ...]] = [()] * asked.services
    spent = []
    heap.reduce_frequency()
    heap.settle()
    for number, samples in enumerate(rows):
        now = START_S + 5.0 * (number + 1)
        began = time.process_time()
        decisions = []
        for i in range(asked.services):
            inputs = ControlInputs(
                "team",
                f"service-{i}",
                settings,
                asked.pods,
                START_S,
                views,
                samples,
                put_outcomes=outcomes[i],
            )
            decision, memories[i] = decide_service(inputs, memories[i], now)
            decisions.append(decision)
        allocations = arbitrate(
            [decision.want for decision in decisions], Budget(total_gpus=10_000)
        )
        for i, decision in enumerate(decisions):
            _, memories[i] = build_report(
                decision, allocations[decision.want.key], memories[i], now
            )
            outcomes[i] = tuple(PutOutcome(p.pod, p.generation, True) for p in decision.puts)
        spent.append(time.process_time() - began)
    median_s = statistics.median(spent[2:])
    print(
        f"{asked.services} services x {asked.pods} pods: median {median_s * 1e3:.0f} ms CPU per tick, "
        f"worst {max(spent[2:]) * 1e3:.0f} ms, {median_s / asked.services * 1e6:.0f} us per service"
    )


if __name__ == "__main__":
    main()
