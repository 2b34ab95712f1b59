"""Collects the token counts of engines, stores them in a file for each hour, and serves reports."""
