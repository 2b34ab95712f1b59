"""Memory that the processes of an engine pod share: regions, their layout, and their bytes. Pure but for `region`."""
