"""Grants: their keys, their signature, and the tokens that read an engine's usage."""
