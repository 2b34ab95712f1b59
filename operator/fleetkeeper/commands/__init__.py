"""The commands of `fleetkeeper`, one file each. They handle input and output only."""
