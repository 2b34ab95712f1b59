"""The telemetry of the process: metrics, health endpoints, logs."""
