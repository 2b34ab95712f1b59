"""Lines for the person who waits: on stderr, so that output can be piped."""

from __future__ import annotations

import typer


def say(text: str) -> None:
    """Prints one line at once."""
    typer.echo(f"local: {text}", err=True)
