"""Reading of input files."""
