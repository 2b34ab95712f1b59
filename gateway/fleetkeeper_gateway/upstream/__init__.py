"""Requests to services: sent at most once, and forwarded as they come."""
