"""Lines that wait and run, in Redis."""
