"""A batch, and the list of batches, as text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleetkeeper.commands.batch.model import ENDED, Document, counts_of
from fleetkeeper.commands.batch.progress import duration

TIMES = (
    ("created", "created_at"),
    ("started", "in_progress_at"),
    ("finalizing", "finalizing_at"),
    ("completed", "completed_at"),
    ("failed", "failed_at"),
    ("cancelling", "cancelling_at"),
    ("cancelled", "cancelled_at"),
    ("expired", "expired_at"),
)
PIPE_WIDTH = 250
COLUMNS = ("ID", "STATUS", "DONE", "FAILED", "TOTAL", "CREATED", "DEADLINE", "ENDPOINT")
STYLES = {"completed": "green", "failed": "bold red", "expired": "red", "cancelled": "yellow"}


def print_batches(batches: Sequence[Document]) -> None:
    """Print a table of batches, whole if it goes to a pipe, which has no width."""
    console = Console()
    console.print(batches_table(batches), width=None if console.is_terminal else PIPE_WIDTH)


def batches_table(batches: Sequence[Document]) -> Table:
    """Return the batches with a row each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        right = name in {"DONE", "FAILED", "TOTAL"}
        # IDs are copied: a narrow terminal cuts the other columns.
        least = (
            max((len(str(batch["id"])) for batch in batches), default=0) if name == "ID" else None
        )
        table.add_column(name, no_wrap=True, min_width=least, justify="right" if right else "left")
    for batch in batches:
        counts, status = counts_of(batch), str(batch["status"])
        table.add_row(
            shown(batch["id"]),
            Text(status, style=STYLES.get(status, "")),
            f"{counts.completed:,}",
            f"{counts.failed:,}",
            f"{counts.total:,}",
            when(batch.get("created_at")),
            when(batch.get("expires_at")),
            shown(batch.get("endpoint", "")),
        )
    return table


def batch_lines(batch: Document, now: float) -> list[str]:
    """Return what is known of a batch.

    Args:
        batch: of the API.
        now: Unix seconds.
    """
    counts = counts_of(batch)
    lines = [f"{batch['id']}  {batch['status']}"]
    if counts.total:
        percent = 100 * counts.done // counts.total
        lines.append(
            f"lines      {counts.done:,} of {counts.total:,} ({percent}%), {counts.failed:,} failed"
        )
    lines += [f"{name:10} {when(batch[key])}" for name, key in TIMES if batch.get(key)]
    if batch.get("expires_at") and batch["status"] not in ENDED:
        left = float(batch["expires_at"]) - now
        past = f"{duration(left)} left" if left > 0 else f"{duration(-left)} ago"
        lines.append(f"{'deadline':10} {when(batch['expires_at'])} ({past})")
    lines += [
        f"{name:10} {batch[key]}"
        for name, key in (
            ("endpoint", "endpoint"),
            ("input", "input_file_id"),
            ("output", "output_file_id"),
            ("errors", "error_file_id"),
        )
        if batch.get(key)
    ]
    lines += [
        f"{'metadata':10} {key}={value}" for key, value in (batch.get("metadata") or {}).items()
    ]
    lines += mistakes_of(batch)
    return ["".join(c if c.isprintable() else "?" for c in line) for line in lines]


def mistakes_of(batch: Document) -> list[str]:
    """Return the mistakes of the input file that the server found."""
    found = (batch.get("errors") or {}).get("data") or []
    return [
        (f"line {mistake['line']}: " if mistake.get("line") else "")
        + f"{mistake.get('message', '')} ({mistake.get('code', '')})"
        for mistake in found
    ]


def when(seconds: float | None) -> str:
    """Return Unix seconds as a time in UTC; - without."""
    if not seconds:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def shown(text: object) -> Text:
    """Return a text of the server without markup and control characters."""
    return Text("".join(letter if letter.isprintable() else "?" for letter in str(text)))
