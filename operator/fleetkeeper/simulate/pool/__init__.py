"""Many services that sleep, on few accelerators, in virtual time."""
