"""Sections of a RESULTS.md: each benchmark replaces its own and keeps the others."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path


def with_section(page: str, heading: str, text: str, title: str) -> str:
    """Return the page with the section `## heading` replaced by this text, or added at the end."""
    parts = re.split(r"(?m)^(?=## )", page or title)
    # Not its spaces: an indented first line is a command.
    body = text.strip("\n")
    section = f"## {heading}\n\n{body}\n"
    found = [n for n, part in enumerate(parts) if part.splitlines()[:1] == [f"## {heading}"]]
    if found:
        parts[found[0]] = section
    else:
        parts.append(section)
    return "\n".join(part.strip() + "\n" for part in parts)


def write_section(heading: str, text: str, page: Path, title: str) -> None:
    """Write a benchmark's section; a page that does not exist begins with the title."""
    old = page.read_text() if page.exists() else ""
    page.write_text(with_section(old, heading, text, title))


def measured_on() -> str:
    """Return the line that names the date and the machine."""
    return (
        f"Measured {datetime.now(UTC):%Y-%m-%d} on {os.cpu_count()} CPUs, {platform.machine()}, "
        f"Python {platform.python_version()}; load average {os.getloadavg()[1]:.1f}."
    )


def markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(headings) + " |", "| --- " * len(headings) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
