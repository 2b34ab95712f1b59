"""Stop texts: the end of an answer at the first of them, also if it spans tokens. Pure."""

from __future__ import annotations


class StopSearch:
    """The text of one answer, searched as it grows."""

    def __init__(self, stops: tuple[str, ...], *, keeps: bool) -> None:
        self._stops = stops
        self._keeps = keeps
        self._held = ""
        """What a stop text may have begun in, and is therefore not sent yet."""
        self._longest = max(map(len, stops))

    def add(self, text: str) -> tuple[str, str | None]:
        """Return what can be sent now, and the stop text that ended the answer."""
        whole = self._held + text
        places = [(at, stop) for stop in self._stops if (at := whole.find(stop)) >= 0]
        if places:
            at, stop = min(places)
            self._held = ""
            return whole[: at + len(stop) * self._keeps], stop
        kept = min(len(whole), self._longest - 1)
        self._held = whole[len(whole) - kept :]
        return whole[: len(whole) - kept], None

    def rest(self) -> str:
        """Return what was not sent when the answer ended by itself."""
        held, self._held = self._held, ""
        return held
