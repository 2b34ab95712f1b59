"""The HTTP port of pid 1: metrics, health, and signed requests for live limits."""
