"""A real Kubernetes control plane on loopback, with fake nodes."""
