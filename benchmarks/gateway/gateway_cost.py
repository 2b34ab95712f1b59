"""What the gateway adds to a request, beside direct requests and, with --before, the gateway of another commit.

    python benchmarks/gateway/gateway_cost.py                    # a quarter of an hour; writes RESULTS.md
    python benchmarks/gateway/gateway_cost.py --quick            # two minutes, to see that it runs; prints alone
    python benchmarks/gateway/gateway_cost.py --before CHECKOUT  # another checkout after `make setup`

The upstream is a stand-in that answers at once, so that the figures are the gateway's own cost. Redis is
a real redis-server, one for each contender. The API server is a stand-in that serves lists and watches.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import contenders
import measures
import proxy_page
import uvloop

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from results_page import measured_on, write_section  # noqa: E402 -- on the path set above


def main() -> None:
    """Measure, print the tables, and write them unless the run is quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="see that it runs; write nothing")
    parser.add_argument("--before", type=Path, help="a checkout whose gateway runs beside this one")
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    args = parser.parse_args()
    allow_open_files()
    size = measures.QUICK_SIZE if args.quick else measures.FULL_SIZE
    with tempfile.TemporaryDirectory(prefix="fleetkeeper-benchmark-") as folder:
        found = uvloop.run(measure(Path(folder), size, args.before))
    text = f"{measured_on()} {proxy_page.setting(contenders.redis_version(), size)}\n\n"
    text += proxy_page.tables(found)
    print(text)
    if not args.quick:
        write_section(proxy_page.HEADING, text, args.out, title=proxy_page.TITLE)


def allow_open_files() -> None:
    """Raise the soft limit of open files: a thousand streams are two thousand sockets of a proxy."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def measure(folder: Path, size: measures.Size, before: Path | None) -> proxy_page.Found:
    """Start every contender, and run each measure in blocks that alternate them."""
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(contenders.upstream())
        direct = contenders.direct(port)
        ours = await stack.enter_async_context(contenders.gateway(folder / "ours", port))
        full = await stack.enter_async_context(contenders.gateway(folder / "full", port, full=True))
        proxies = [ours, full]
        if before is not None:
            other = contenders.gateway(folder / "before", port, checkout=before)
            proxies.append(await stack.enter_async_context(other))
        everyone = [direct, *proxies]
        return proxy_page.Found(
            latency=await measures.in_blocks(
                everyone, size.blocks, measures.latency(size, measures.RATE)
            ),
            low=await measures.in_blocks(
                everyone, size.blocks, measures.latency(size, measures.LOW_RATE)
            ),
            capacity=await measures.in_blocks(proxies, size.blocks, measures.capacity(size)),
            streams=await measures.in_blocks(everyone, size.blocks, measures.stream_gaps(size)),
            memory={item.name: await measures.memory(item, size) for item in proxies},
        )


if __name__ == "__main__":
    main()
