"""Fleetkeeper: a Kubernetes operator that keeps fleets of vLLM."""
