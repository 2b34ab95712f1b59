"""Fleetkeeper: a Kubernetes operator that runs and autoscales vLLM fleets."""
