"""What the process shows of itself: metrics, health endpoints, logs."""
