"""Memory of the pod and of its devices: readers, and the verdict on the memory cap."""
