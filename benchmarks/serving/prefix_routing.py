"""Conversations with long histories, routed by load and by prefix: TTFT and prefix cache hits.

    .venv/bin/python benchmarks/serving/prefix_routing.py

It needs root, and no other node on the machine. Everything is real: the local node, the chart, two
vLLM pods, and the router. The same load is sent with `routing.policy: LeastLoaded` and `PrefixAware`,
in the order A B B A, always with conversations that no engine has seen. The section in RESULTS.md is
replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from results_page import markdown_table, measured_on, write_section  # noqa: E402

from fleetkeeper_local.common.paths import data_dir  # noqa: E402
from fleetkeeper_local.common.report import say  # noqa: E402
from fleetkeeper_local.demo.fleet import Fleet  # noqa: E402
from fleetkeeper_local.demo.installation import ensure_namespace  # noqa: E402
from fleetkeeper_local.demo.stage import LocalStage  # noqa: E402
from fleetkeeper_local.load.summary import quantile  # noqa: E402
from fleetkeeper_local.node.flags import read_settings  # noqa: E402
from fleetkeeper_local.node.node import Node  # noqa: E402
from tests.support.service_world import metrics, tiny  # noqa: E402

HEADING = "Conversations, routed by load and by prefix"
TENANT = "fleetkeeper-prefix"
ORDER: Final = ("LeastLoaded", "PrefixAware", "PrefixAware", "LeastLoaded")
READING: Final = (
    "The key is the first 1,024 bytes of the body, which are the same in all turns of a conversation. With vllm-router's "
    "`cache_aware`, on the same load and an equal machine, 51% of the prompt tokens came from the cache, and the first token "
    "came later than by load (129 ms instead of 105 ms at P50): every replica tokenized every prompt."
)
TURNS = 3
WORDS = 450
"""Of the history: about 1,100 tokens of the tiny model's tokenizer."""
OUTPUT_TOKENS = 8
VOCABULARY: Final = [
    "the",
    "queue",
    "batch",
    "wait",
    "time",
    "step",
    "token",
    "cache",
    "engine",
    "fleet",
    "prompt",
    "request",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `hit_ratio`: prompt tokens found in the prefix cache."""

    requests: int
    failed: int
    ttft_p50_s: float
    ttft_p95_s: float
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation: its time in the run, and its prompt."""

    at_s: float
    prompt: str


def planned_turns(conversations: int, rate_per_s: float, seed: int) -> list[Turn]:
    """Return the turns of all conversations in order of time.

    Conversations begin as a Poisson process; the turns of one are 5 to 15 s apart, and each repeats
    the history before it.

    >>> turns = planned_turns(2, 1.0, seed=1)
    >>> len(turns), [turn.at_s for turn in turns] == sorted(turn.at_s for turn in turns)
    (6, True)
    """
    choice = random.Random(seed)
    found, begin_s = [], 0.0
    for number in range(conversations):
        begin_s += choice.expovariate(rate_per_s / TURNS)
        history = f"Conversation {seed}-{number}: " + " ".join(choice.choices(VOCABULARY, k=WORDS))
        at_s = begin_s
        for turn in range(TURNS):
            history += f" Question {turn}: {' '.join(choice.choices(VOCABULARY, k=8))}?"
            found.append(Turn(at_s, history))
            at_s += choice.uniform(5.0, 15.0)
    return sorted(found, key=lambda turn: turn.at_s)


async def send(url: str, model: str, turns: Sequence[Turn]) -> list[float | None]:
    """Send each turn at its time; return the times to the first token in seconds, None if it failed."""
    started = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=120.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def ask(turn: Turn) -> float | None:
            await asyncio.sleep(max(0.0, turn.at_s - (time.monotonic() - started)))
            sent = time.monotonic()
            body = {
                "model": model,
                "prompt": turn.prompt,
                "max_tokens": OUTPUT_TOKENS,
                "stream": True,
                "ignore_eos": True,
            }
            first: float | None = None
            try:
                async with session.post(f"{url}/completions", json=body) as answer:
                    if answer.status != 200:
                        return None
                    async for line in answer.content:
                        if first is None and line.startswith(b"data: {"):
                            first = time.monotonic() - sent
            except (TimeoutError, aiohttp.ClientError):
                return None
            return first

        return await asyncio.gather(*(ask(turn) for turn in turns))


def counted(fleet: Fleet) -> Mapping[str, float]:
    """Return the sums over all engines: prefix cache queries and hits in tokens."""
    total = {"queries": 0.0, "hits": 0.0}
    for pod in fleet.engines():
        for name, value in metrics(pod).items():
            if name.startswith("vllm:prefix_cache_queries_total"):
                total["queries"] += value
            elif name.startswith("vllm:prefix_cache_hits_total"):
                total["hits"] += value
    return total


def route(fleet: Fleet, policy: str) -> None:
    """Change the policy, and return when only routers with it are left."""
    if fleet.live()["spec"].get("routing", {}).get("policy", "LeastLoaded") == policy:
        return
    old = {pod.uid for pod in fleet.pods("router")}
    fleet.change({"routing": {"policy": policy}})
    fleet.until(
        lambda: (
            all(pod.ready and pod.uid not in old for pod in fleet.pods("router"))
            and fleet.is_ready()
        ),
        f"routers with {policy}",
    )


def measured(fleet: Fleet, policy: str, args: argparse.Namespace, seed: int) -> Outcome:
    """Route by this policy, send the load once, and return the figures."""
    route(fleet, policy)
    say(f"{policy}: {args.conversations} conversations of {TURNS} turns, {args.rate:g} requests/s")
    before = counted(fleet)
    turns = planned_turns(args.conversations, args.rate, seed)
    answers = asyncio.run(send(fleet.base_url(), fleet.name, turns))
    after = counted(fleet)
    gained = {name: after[name] - before[name] for name in after}
    times = sorted(value for value in answers if value is not None)
    found = Outcome(
        requests=len(answers),
        failed=len(answers) - len(times),
        ttft_p50_s=quantile(times, 0.5) or 0.0,
        ttft_p95_s=quantile(times, 0.95) or 0.0,
        hit_ratio=gained["hits"] / gained["queries"] if gained["queries"] else 0.0,
    )
    say(f"{policy}: {found}")
    return found


def render(runs: Mapping[str, Sequence[Outcome]], args: argparse.Namespace) -> str:
    """Return the section of RESULTS.md."""
    rows = [
        [
            policy,
            str(sum(run.requests for run in found)),
            str(sum(run.failed for run in found)),
            f"{median(run.hit_ratio for run in found):.0%}",
            f"{median(run.ttft_p50_s for run in found) * 1e3:.0f} ms",
            f"{median(run.ttft_p95_s for run in found) * 1e3:.0f} ms",
        ]
        for policy, found in runs.items()
    ]
    table = markdown_table(
        [
            "policy",
            "requests",
            "failed",
            "prompt tokens from the prefix cache",
            "TTFT P50",
            "TTFT P95",
        ],
        rows,
    )
    by_load, by_prefix = (runs[policy] for policy in ("LeastLoaded", "PrefixAware"))
    ratios = [
        median(getattr(run, name) for run in by_prefix)
        / median(getattr(run, name) for run in by_load)
        for name in ("ttft_p50_s", "ttft_p95_s")
    ]
    setting = (
        f"Two replicas of `examples/tiny.yaml` (600m CPU each) behind the router on one machine. "
        f"{args.conversations} conversations a run, {TURNS} turns each, 5 to 15 s apart; a turn repeats its history of about "
        f"1,100 tokens; {args.rate:g} requests/s, {OUTPUT_TOKENS} tokens of output. Runs in the order "
        f"{', '.join(ORDER)}, each with new conversations; medians of two runs. By load, a second turn finds "
        "its history in half of all cases with two replicas, and in fewer with more."
    )
    summary = f"PrefixAware against LeastLoaded: TTFT P50 {ratios[0]:.2f} times, P95 {ratios[1]:.2f} times."
    command = "    .venv/bin/python benchmarks/serving/prefix_routing.py"
    return "\n\n".join([command, setting, table, summary, READING, measured_on()])


def main() -> None:
    """Run the benchmark, write the section, and remove the node."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=60, help="of a run")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--json", type=Path, default=Path("out/benchmarks/prefix_routing.json"))
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    parser.add_argument("--keep", action="store_true", help="leave the node running")
    args = parser.parse_args()
    node = Node(read_settings(data_dir()))
    try:
        stage = LocalStage(node)
        stage.install()
        ensure_namespace(stage.cluster, TENANT)
        stage.put_model(TENANT)
        runs = run_all(stage, args)
    finally:
        if not args.keep:
            node.down()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    rows = {policy: [asdict(run) for run in found] for policy, found in runs.items()}
    args.json.write_text(json.dumps(rows, indent=1) + "\n")
    text = render(runs, args)
    if args.write:
        write_section(HEADING, text)
    say(text)


def run_all(stage: LocalStage, args: argparse.Namespace) -> dict[str, list[Outcome]]:
    """Create the service, measure all runs, and remove it."""
    fleet = Fleet(stage.cluster, TENANT, "prefix")
    fleet.said = say
    manifest = tiny(scaling={"minReplicas": 2, "maxReplicas": 2})
    manifest["metadata"]["name"] = fleet.name
    fleet.kubectl("apply", "-f", "-", given=json.dumps(manifest))
    runs: dict[str, list[Outcome]] = {}
    try:
        fleet.await_ready(2)
        for seed, policy in enumerate(ORDER):
            runs.setdefault(policy, []).append(measured(fleet, policy, args, seed))
    finally:
        fleet.kubectl("delete", f"inferenceservices.fleetkeeper.io/{fleet.name}", "--wait=true")
        fleet.until(lambda: not fleet.pods("engine"), "all pods are gone")
    return runs


if __name__ == "__main__":
    main()
