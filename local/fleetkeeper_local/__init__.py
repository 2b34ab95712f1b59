"""A real single-node Kubernetes on this machine, started and removed with one command each."""
