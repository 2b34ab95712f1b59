"""Batch limits: an ordered chain of small rules, of which the first that applies decides."""
