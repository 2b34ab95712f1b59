"""Memory of the pod and of its devices: readers, and when the memory cap is exceeded."""
