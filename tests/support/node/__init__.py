"""Fleets and programs on a local node."""
