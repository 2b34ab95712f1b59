"""A pytest plugin: the slice of the long lane, the quarantine, and what both print at the end."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import pytest

from lanes import parent, quarantine, slices
from lanes.processor import ProcessorTime

NOT_THIS_CHANGE: Final = "not this change"
"""Name in pytest's closing line of failures that the first parent has too."""
NOTES: Final = "out/not-this-change"


def add_options(parser: pytest.Parser) -> None:
    """Add the options of the lanes; a conftest.py calls this from its pytest_addoption."""
    group = parser.getgroup("lanes")
    group.addoption(
        "--slice",
        metavar="auto|N",
        help="of the tests with the mark `exhaustive` run those of one slice alone; what fails of it is run again on the first parent",
    )
    group.addoption(
        "--record-durations",
        action="store_true",
        help=f"write how long the exhaustive tests of this run took to {slices.FILE}",
    )
    group.addoption("--with-quarantined", action="store_true", help="run tests in quarantine too")
    group.addoption(
        "--processor-bound",
        type=float,
        metavar="SECONDS",
        help="print the processor seconds of this run with all that it starts, beside this bound",
    )


class _Node(Protocol):
    workeroutput: dict[str, Any]


@dataclass
class Ran:
    """The sum of the reports of an exhaustive test."""

    seconds: float = 0.0
    outcomes: set[str] = field(default_factory=set)

    @property
    def outcome(self) -> str:
        """Return the worst of its set-up, call and tear-down."""
        return next(name for name in ("failed", "skipped", "passed") if name in self.outcomes)


class Lanes:
    """The plugin of one process: of a worker, which selects, or of the one that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self.worker = hasattr(config, "workerinput")
        self.entries = (
            [] if config.option.with_quarantined else quarantine.read_quarantine(self.root)
        )
        self.selected: dict[str, Any] = {"slice": "", "quarantined": [], "error": ""}
        """The report of a worker to the printing process: plain values."""
        self.ran: dict[str, Ran] = defaultdict(Ran)
        self.verdicts: list[parent.Verdict] = []
        wanted = config.option.processor_bound is not None and not self.worker
        self.processor = ProcessorTime() if wanted else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselect what is in quarantine, and what is exhaustive and not in the slice.

        Without a valid slice nothing runs. A worker cannot raise that to who reads: pytest-xdist drops it.
        """
        out = {item for item in items if any(entry.covers(item.nodeid) for entry in self.entries)}
        self.selected["quarantined"] = [item.nodeid for item in items if item in out]
        if self.config.option.slice:
            long = [item for item in items if item.get_closest_marker("exhaustive")]
            try:
                held = self._slice([item.nodeid for item in long])
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                self.selected["error"] = f"--slice={self.config.option.slice}: {error}"
                out.update(items)
            else:
                out.update(item for item in long if item.nodeid not in held)
        if out:
            self.config.hook.pytest_deselected(items=list(out))
            items[:] = [item for item in items if item not in out]

    def _slice(self, tests: Sequence[str]) -> frozenset[str]:
        """Return the tests of the slice; raise if there is none of that name, or no commit to name it."""
        packed = slices.packed(tests, slices.read_durations(self.root))
        wanted, count = self.config.option.slice, len(packed)
        if not packed:
            self.selected["slice"] = "none: no test of the long lane was collected"
            return frozenset()
        if wanted == "auto":
            number, why = slices.slice_number(self.root, count)
        elif wanted.isdecimal() and 1 <= int(wanted) <= count:
            number, why = int(wanted), "given"
        else:
            raise ValueError(f"give auto, or a number from 1 to {count}")
        self.selected["slice"] = f"{number} of {count} ({why})"
        return packed[number - 1]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: _Node) -> None:
        """Keep what a worker selected; all select the same."""
        self.selected = getattr(node, "workeroutput", {}).get("lanes", self.selected)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the reports of exhaustive tests."""
        if "exhaustive" in report.keywords:
            ran = self.ran[report.nodeid]
            ran.seconds += report.duration
            ran.outcomes.add(report.outcome)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Record durations; judge failures of the slice when the workers have ended."""
        if self.worker:
            self.config.workeroutput["lanes"] = self.selected  # type: ignore[attr-defined]  # xdist's
            return
        if self.selected["error"]:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        if self.config.option.record_durations:
            passed = {
                test: ran.seconds for test, ran in self.ran.items() if ran.outcome == "passed"
            }
            slices.write_durations(self.root, passed)
        failed = sorted(test for test, ran in self.ran.items() if ran.outcome == "failed")
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if self.config.option.slice and failed and terminal:
            self._judge(session, terminal, failed)

    def _judge(
        self, session: pytest.Session, terminal: pytest.TerminalReporter, failed: Sequence[str]
    ) -> None:
        terminal.ensure_newline()
        self.verdicts = parent.judge(self.root, failed, terminal.write_line)
        others = {verdict.test for verdict in self.verdicts if not verdict.blocks}
        for kind in ("failed", "error"):
            reports = terminal.stats.pop(kind, [])
            moved = [report for report in reports if report.nodeid in others]
            if kept := [report for report in reports if report.nodeid not in others]:
                terminal.stats[kind] = kept
            if moved:
                terminal.stats.setdefault(NOT_THIS_CHANGE, []).extend(moved)
        self._note(terminal.stats.get(NOT_THIS_CHANGE, []))
        blocked = terminal.stats.keys() & {"failed", "error"}
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and not blocked:
            session.exitstatus = pytest.ExitCode.OK

    def _note(self, reports: Sequence[Any]) -> None:
        """Write the failures here and on the parent, for who corrects them."""
        folder = self.root / NOTES
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.txt"):
            old.unlink()
        for number, report in enumerate(reports, start=1):
            (there,) = (verdict for verdict in self.verdicts if verdict.test == report.nodeid)
            (folder / f"{number}.txt").write_text(
                f"{report.nodeid} ({report.when}): {there.why}\n\n"
                f"=== here\n{report.longreprtext}\n\n=== on the parent\n{there.output}"
            )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the slice, the quarantine and the processor seconds."""
        if self.selected["error"]:
            terminalreporter.write_line(f"ERROR: {self.selected['error']}", red=True)
        if self.config.option.slice and self.selected["slice"]:
            self._print_slice(terminalreporter)
        if self.selected["quarantined"]:
            terminalreporter.section(f"in quarantine, not run ({quarantine.FILE})")
            for test in self.selected["quarantined"]:
                (entry, *_) = (entry for entry in self.entries if entry.covers(test))
                terminalreporter.write_line(f"{test}: since {entry.since}, {entry.reason}")
        if self.processor is not None:
            used = self.processor.used()
            left = self.processor.close()
            terminalreporter.section("processor seconds, user and system")
            bound = f"bound {self.config.option.processor_bound:.0f}"
            terminalreporter.write_line(
                f"{'this run':10} {used.own_s:7.0f}  {bound}; {used.source}{left and '; '}{left}"
            )
            terminalreporter.write_line(
                f"{'machine':10} {used.machine_s:7.0f}  all processes in that time"
            )

    def _print_slice(self, terminal: pytest.TerminalReporter) -> None:
        terminal.section(f"slice {self.selected['slice']} of the long lane")
        outcomes = [ran.outcome for ran in self.ran.values()]
        counts = ", ".join(
            f"{outcomes.count(name)} {name}"
            for name in ("passed", "failed", "skipped")
            if name in outcomes
        )
        seconds = sum(ran.seconds for ran in self.ran.values())
        terminal.write_line(f"{counts or 'no tests'}, {seconds:.0f} s summed over the workers")
        for verdict in self.verdicts:
            kind = "blocks" if verdict.blocks else f"{NOT_THIS_CHANGE} (see {NOTES})"
            terminal.write_line(f"{verdict.test}: {kind}: {verdict.why}")
