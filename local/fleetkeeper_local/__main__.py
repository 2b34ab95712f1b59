"""`python -m fleetkeeper_local`: the same as `fleetkeeper local`."""

from fleetkeeper_local.cli import app

app(prog_name="fleetkeeper local")
