"""Counts the tokens of each request in the API server."""
