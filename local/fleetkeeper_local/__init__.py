"""A real single-node Kubernetes on this machine, started and removed by one command each."""
