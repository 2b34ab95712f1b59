"""API servers: real ones, proxies in front of them, and doubles."""
