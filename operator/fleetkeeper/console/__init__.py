"""The read-only web page of `fleetkeeper console`, served on loopback."""
