"""What the gateway reads from the Kubernetes API server: watches, nothing else."""
