"""The gateway before a real vLLM on CPU with the tiny model, beside direct requests.

    python benchmarks/gateway/run_engine.py                 # six minutes; writes RESULTS.md
    python benchmarks/gateway/run_engine.py --quick         # two minutes, to see that it runs
    python benchmarks/gateway/run_engine.py --lock FILE     # holds a lock, on shared machines

It needs `make setup-engine`. The tiny model makes the engine as fast as an engine can be, so the gateway's
share is larger than with any real model.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import contenders
import uvloop
from measures import in_blocks
from proxy_figures import DIRECT, OURS, StreamCell, added, percentile, ratio, spread
from proxy_page import TITLE
from results_page import markdown_table, measured_on, write_section
from thin_client import stream_clients

from tests.support.inside_engine import InsideEngine

HERE = Path(__file__).resolve().parent
HEADING = "Before a real vLLM"
CLIENTS, TOKENS = 8, 64


def main() -> None:
    """Measure and print; write the section unless the run is quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="see that it runs; write nothing")
    parser.add_argument("--lock", type=Path, help="file to lock while it measures")
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    args = parser.parse_args()
    blocks, seconds = (2, 5.0) if args.quick else (4, 15.0)
    with (
        _locked(args.lock),
        tempfile.TemporaryDirectory(prefix="fleetkeeper-benchmark-") as folder,
    ):
        engine = InsideEngine(Path(folder) / "engine")
        try:
            found = uvloop.run(measure(Path(folder), engine.port, blocks, seconds))
        finally:
            engine.stop()
    text = page(found, seconds)
    print(text)
    if not args.quick:
        write_section(HEADING, text, args.out, title=TITLE)


@contextlib.contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def measure(
    folder: Path, port: int, blocks: int, seconds: float
) -> list[dict[str, StreamCell]]:
    """Return the cells of each block; direct requests and those through the gateway alternate."""

    async def engine_streams(contender: contenders.Contender, _: int) -> StreamCell:
        await stream_clients(contender.target, CLIENTS, TOKENS, 2.0)
        began = perf_counter()
        found = await stream_clients(contender.target, CLIENTS, TOKENS, seconds)
        took_s = perf_counter() - began  # until the last stream, which began before the end
        return StreamCell(
            percentile(found.first, 0.5) * 1e3,
            percentile(found.gaps, 0.5) * 1e3,
            percentile(found.gaps, 0.99) * 1e3,
            found.failed,
            len(found.first) * TOKENS / took_s,
        )

    async with contenders.gateway(folder / "ours", port, full=False) as ours:
        return await in_blocks([contenders.direct(port), ours], blocks, engine_streams)


def page(blocks: list[dict[str, StreamCell]], seconds: float) -> str:
    """Return the section in Markdown."""
    figures: list[tuple[str, Callable[[StreamCell], float], str]] = [
        ("first token P50", lambda cell: cell.first_p50_ms, " ms"),
        ("gap P50", lambda cell: cell.gap_p50_ms, " ms"),
        ("gap P99", lambda cell: cell.gap_p99_ms, " ms"),
        ("tokens/s", lambda cell: cell.tokens_per_s, ""),
    ]
    rows = [
        [
            label,
            spread(figure(block[DIRECT]) for block in blocks).text(1, unit),
            spread(figure(block[OURS]) for block in blocks).text(1, unit),
            added(blocks, OURS, figure).text(1, unit),
        ]
        for label, figure, unit in figures
    ]
    share = ratio(blocks, OURS, DIRECT, lambda cell: cell.tokens_per_s)
    failed = sum(cell.failed for block in blocks for cell in block.values())
    return (
        f"{measured_on()} vLLM on CPU with the tiny model, {CLIENTS} clients that read one stream of "
        f"{TOKENS} tokens after another; {len(blocks)} blocks of {seconds:g} s each, which alternate. Engine, "
        "gateway, Redis and clients share the machine, so what the gateway computes, the engine lacks.\n\n"
        + markdown_table(["", DIRECT, OURS, "difference"], rows)
        + f"\n\nThroughput is {share.text(2)} times that of direct requests. {failed} streams failed.\n"
    )


if __name__ == "__main__":
    main()
