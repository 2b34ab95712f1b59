"""Watches of the Kubernetes API server, the only requests that the gateway sends to it."""
