"""Operators as processes and in parts."""
