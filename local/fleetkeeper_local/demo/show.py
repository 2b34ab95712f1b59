"""The live view: `fleetkeeper top` above, the load below; plain lines without a terminal."""

from __future__ import annotations

import time
from collections import Counter
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fleetkeeper.commands.fleet.top import fleet_table
from fleetkeeper.fleet.view import views_of
from fleetkeeper_local.demo.play import Play
from fleetkeeper_local.demo.recorder import Recorder

LINE_EVERY_S = 5.0
MOMENTS_SHOWN = 6


class Show:
    """A context manager; the play calls its `update`."""

    def __init__(self, recorder: Recorder) -> None:
        """Show the recorder's last reading."""
        self._recorder = recorder
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._next_line_s = 0.0

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last view on the screen."""
        if self._console.is_terminal:
            self._live.stop()

    def update(self, play: Play) -> None:
        """Draw, or print a line every few seconds."""
        if self._console.is_terminal:
            self._live.update(self._screen(play), refresh=True)
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + LINE_EVERY_S
            line = f"{_load_line(play)} | {play.fleet.summary()}"
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _screen(self, play: Play) -> RenderableType:
        fleet = self._recorder.fleet
        rows: list[RenderableType] = [
            fleet_table(views_of(fleet.services, fleet.gauges), time.time()),
            Text(""),
            Text(_load_line(play), style="bold"),
        ]
        rows += [
            Text(f"{moment.at_s - play.start_s:6.0f} s  {moment.text}", style="yellow")
            for moment in play.moments[-MOMENTS_SHOWN:]
        ]
        return Group(*rows)


def _load_line(play: Play) -> str:
    sent = sum(traffic.sent for traffic in play.traffic)
    samples = [sample for traffic in play.traffic for sample in list(traffic.samples)]
    causes = Counter("answered" if s.outcome.ok else s.outcome.cause for s in samples)
    shown = ", ".join(f"{count} {cause}" for cause, count in causes.most_common())
    return f"{time.time() - play.start_s:4.0f} s  load {play.phase}: {sent} sent, {shown or 'none answered yet'}"
