"""The life of a batch from its creation to its files, in the process that leads."""
