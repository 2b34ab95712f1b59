"""Worlds, fixtures and doubles that tests share."""
