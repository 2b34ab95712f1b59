"""The HTTP API: files and batches."""
