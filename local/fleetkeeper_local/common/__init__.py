"""Errors, files, locks, paths and programs that every room uses."""
