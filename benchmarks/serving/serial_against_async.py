"""100 prompts sent sequentially and concurrently, through the address of a service.

    python benchmarks/serving/serial_against_async.py --url http://127.0.0.1:8080/v1 --model chat

Both ways use the same pooled client, so that only concurrency differs. Passes alternate
(sequential, concurrent, sequential ...) so that both run under the same conditions, and medians are
compared. RESULTS.md was measured with the service in service.yaml.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fleetkeeper_local.load.client import CompletionClient, Outcome, Patience

FIRST_TOKEN_ID = 10
TOKEN_IDS = 900


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all prompts: seconds, tokens, failures and retries."""

    way: str
    seconds: float
    tokens: int
    failed: int
    retried: int


def prompts(count: int, tokens: int, salt: int) -> list[list[int]]:
    """Return prompts of equal length, different in every pass (so no prefix cache helps)."""
    return [
        [FIRST_TOKEN_ID + (salt * 131 + n * 31 + k * 7) % TOKEN_IDS for k in range(tokens)]
        for n in range(count)
    ]


def summarised(way: str, seconds: float, outcomes: list[Outcome]) -> Run:
    """Return the outcomes of a pass as one row."""
    return Run(
        way,
        seconds,
        sum(outcome.tokens for outcome in outcomes),
        sum(not outcome.ok for outcome in outcomes),
        sum(outcome.attempts > 1 for outcome in outcomes),
    )


async def serial(client: CompletionClient, asked: list[list[int]], args: argparse.Namespace) -> Run:
    """Send one prompt after another."""
    started = time.perf_counter()
    outcomes = [
        await client.complete(prompt, args.max_tokens, stream=args.stream) for prompt in asked
    ]
    return summarised("sequential", time.perf_counter() - started, outcomes)


async def together(
    client: CompletionClient, asked: list[list[int]], args: argparse.Namespace
) -> Run:
    """Send all prompts at once."""
    started = time.perf_counter()
    outcomes = await asyncio.gather(
        *(client.complete(prompt, args.max_tokens, stream=args.stream) for prompt in asked)
    )
    return summarised("concurrent", time.perf_counter() - started, list(outcomes))


async def measure(args: argparse.Namespace, console: Console) -> list[Run]:
    """Warm up, then alternate both ways."""
    runs: list[Run] = []
    patience = Patience(attempts=8, request_timeout_s=600)
    async with CompletionClient(args.url, args.model, patience=patience) as client:
        warm = await client.complete(prompts(1, args.prompt_tokens, 0)[0], args.max_tokens)
        if not warm.ok:
            sys.exit(f"{args.url} does not serve model {args.model!r}: {warm.cause} {warm.detail}")
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("passes", total=2 * args.passes)
            for number in range(args.passes):
                for way, salt in ((serial, 2 * number + 1), (together, 2 * number + 2)):
                    asked = prompts(args.prompts, args.prompt_tokens, salt)
                    runs.append(await way(client, asked, args))
                    progress.advance(task)
    return runs


def report(runs: list[Run], args: argparse.Namespace) -> tuple[Table, str, float]:
    """Return the table for the terminal, the same in Markdown, and the ratio of the medians."""
    medians: dict[str, float] = {}
    table = Table(title=f"{args.prompts} prompts, {args.max_tokens} tokens each")
    headings = ("way", "passes", "median s", "tokens/s", "failed", "retried")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "way" else "right")
    lines = ["| " + " | ".join(headings) + " |", "| --- " * len(headings) + "|"]
    for way in dict.fromkeys(run.way for run in runs):
        group = [run for run in runs if run.way == way]
        medians[way] = statistics.median(run.seconds for run in group)
        rate = statistics.median(run.tokens / run.seconds for run in group)
        cells = (
            way,
            str(len(group)),
            f"{medians[way]:.2f}",
            f"{rate:.0f}",
            str(sum(run.failed for run in group)),
            str(sum(run.retried for run in group)),
        )
        table.add_row(*cells)
        lines.append("| " + " | ".join(cells) + " |")
    ratio = medians["sequential"] / medians["concurrent"]
    lines += ["", f"Concurrent requests are {ratio:.1f} times as fast."]
    return table, "\n".join(lines) + "\n", ratio


def main() -> None:
    """Measure and print; write Markdown if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="base URL, ends in /v1")
    parser.add_argument("--model", required=True, help="served name of the model")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--stream", action="store_true", help="stream the responses token by token")
    parser.add_argument("--passes", type=int, default=3, help="passes per way")
    parser.add_argument("--at-least", type=float, default=0.0, help="fail below this ratio")
    parser.add_argument("--out", type=Path, help="write the table as Markdown to this file")
    args = parser.parse_args()
    console = Console()
    runs = asyncio.run(measure(args, console))
    table, markdown, ratio = report(runs, args)
    console.print(table)
    console.print(f"Concurrent requests are {ratio:.1f} times as fast.")
    if args.out:
        args.out.write_text(markdown)
    if ratio < args.at_least or any(run.failed for run in runs):
        sys.exit(f"goal missed: at least {args.at_least:g} times as fast and no failed request")


if __name__ == "__main__":
    main()
