"""The parts of `fleetkeeper support-bundle`."""
