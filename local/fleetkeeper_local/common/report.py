"""Progress lines for the user, on stderr so that the output can be piped."""

from __future__ import annotations

import typer


def say(text: str) -> None:
    """Print one line at once."""
    typer.echo(f"local: {text}", err=True)
