"""Kinds of accelerators: what differs between them, behind the protocols of `interface`."""
