"""The state of a service in a snapshot: workloads, pods and their problems."""
