"""Servers that Fleetkeeper meets: Redis, Prometheus, object stores, hubs, collectors."""
