"""Collects what the engines counted, keeps it in files by the hour, and answers for it."""
