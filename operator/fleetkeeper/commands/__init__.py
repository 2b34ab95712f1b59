"""The commands of the command line, one file each. They speak; the work is done elsewhere."""
