"""The control loop: replicas and batch limits that follow queue wait and batch time."""
