"""A real single-node Kubernetes: containerd, kubelet, DNS, Prometheus."""
