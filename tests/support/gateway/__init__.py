"""The gateway's processes, clients and surroundings."""
