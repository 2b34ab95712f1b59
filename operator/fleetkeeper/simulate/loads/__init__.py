"""What arrives: traces and patterns."""
