"""Logs and metrics. Neither holds a key, a prompt or an answer."""
