"""Requests to services, each sent at most once, and their responses, forwarded as they arrive."""
