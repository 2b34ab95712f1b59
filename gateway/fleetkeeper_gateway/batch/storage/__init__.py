"""Objects in a store: files, batches, and results."""
