"""The console's fleet, page and browser."""
