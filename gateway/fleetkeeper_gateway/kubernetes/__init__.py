"""What the gateway reads from the Kubernetes API server: lists and watches, nothing else."""
