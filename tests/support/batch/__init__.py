"""Doubles and processes for tests of batches."""
