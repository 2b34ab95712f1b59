"""Watches of the Kubernetes API server. The gateway writes nothing to it but wake marks."""
