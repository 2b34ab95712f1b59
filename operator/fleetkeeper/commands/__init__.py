"""The commands of `fleetkeeper`, in packages by subject. They handle input and output only."""
