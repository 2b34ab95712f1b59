"""`python -m fleetkeeper_engine.simulated`: a simulated engine, started with vLLM's arguments."""

from __future__ import annotations

import asyncio
import logging
import sys

from fleetkeeper_engine.simulated.options import parse_options
from fleetkeeper_engine.simulated.server import SimulatedServer
from fleetkeeper_engine.simulated.simulation_settings import SimulationSettings


def main() -> None:
    """Run until a signal. Exit with status 1 if the engine died, 2 if an option is wrong."""
    logging.basicConfig(
        level=logging.INFO,
        format="(Simulated pid=%(process)d) %(levelname)s %(asctime)s %(message)s",
        stream=sys.stderr,
    )
    options = parse_options(sys.argv[1:])
    settings = SimulationSettings.of_environment()

    async def run() -> bool:
        return await SimulatedServer(options, settings).run()

    sys.exit(0 if asyncio.run(run()) else 1)


if __name__ == "__main__":
    main()
