"""The command `fleetkeeper simulate`: its arguments, and a fit to measurements."""
