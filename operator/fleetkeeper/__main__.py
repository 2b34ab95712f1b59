"""The entry point of `python -m fleetkeeper`, the same as `fleetkeeper`."""

from fleetkeeper.cli import main

main()
