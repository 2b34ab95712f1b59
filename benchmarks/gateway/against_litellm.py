"""What the gateway adds to a request, beside direct requests and LiteLLM's proxy.

    python benchmarks/gateway/against_litellm.py            # 20 minutes; writes RESULTS.md
    python benchmarks/gateway/against_litellm.py --quick    # two minutes, to see that it runs; prints alone
    python benchmarks/gateway/against_litellm.py --without-litellm

The upstream is a stand-in that answers at once, so that the figures are the proxy's own cost. Redis is
a real redis-server, one for each contender. The API server is a stand-in that serves lists and watches.
`run_engine.py` measures the gateway before a real vLLM.
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
    parser.add_argument("--without-litellm", action="store_true", help="leave LiteLLM's proxy out")
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    args = parser.parse_args()
    allow_open_files()
    size = measures.QUICK_SIZE if args.quick else measures.FULL_SIZE
    with tempfile.TemporaryDirectory(prefix="fleetkeeper-benchmark-") as folder:
        found = uvloop.run(measure(Path(folder), size, with_litellm=not args.without_litellm))
    versions = contenders.versions(with_litellm=not args.without_litellm)
    text = f"{measured_on()} {proxy_page.setting(versions, size)}\n\n"
    text += proxy_page.tables(found)
    print(text)
    if not args.quick:
        write_section(proxy_page.HEADING, text, args.out, title=proxy_page.TITLE)


def allow_open_files() -> None:
    """Raise the soft limit of open files: a thousand streams are two thousand sockets of a proxy."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def measure(folder: Path, size: measures.Size, *, with_litellm: bool) -> proxy_page.Found:
    """Start every contender, and run each measure in blocks that alternate them."""
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(contenders.upstream())
        direct = contenders.direct(port)
        ours = await stack.enter_async_context(
            contenders.gateway(folder / "ours", port, full=False)
        )
        full = await stack.enter_async_context(contenders.gateway(folder / "full", port, full=True))
        proxies = [ours, full]
        if with_litellm:
            proxies.append(
                await stack.enter_async_context(contenders.litellm(folder / "litellm", port))
            )
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
