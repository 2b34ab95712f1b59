"""Engines, real and simulated, and what speaks to them."""
