"""Memory that the processes of an engine pod share: the region, its layout, and its encoding."""
