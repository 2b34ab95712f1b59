"""Commands that show a running fleet."""
