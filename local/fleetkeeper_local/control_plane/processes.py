"""The processes of one cluster, each with a record on disk by which a later command finds it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.control_plane.ports import PortInUse

POLL_S = 0.03
"""Time between two readiness checks of a starting component."""


@dataclass(frozen=True)
class _Record:
    """A process's record; the start time distinguishes it from a later process with the same pid."""

    pid: int
    create_time: float
    argv: list[str]


class ComponentFailed(LocalError):
    """A component ended or was not ready in time; the text contains the end of its log."""


class Processes:
    """The processes of a cluster, identified by pid and start time, never by name."""

    def __init__(self, folder: Path, *, tied: bool) -> None:
        """Keep records in `folder`/run and logs in `folder`/logs.

        Args:
            folder: the cluster's data directory.
            tied: whether the kernel ends the processes when the thread that started them ends
                (so a killed test session leaves nothing behind).
        """
        self._records = folder / "run"
        self._logs = folder / "logs"
        self._tied = tied
        self._children: set[int] = set()

    def log_file(self, name: str) -> Path:
        """Return the file of a component's output."""
        return self._logs / f"{name}.log"

    def names(self) -> list[str]:
        """Return the components that have a record, running or not."""
        return sorted(path.stem for path in self._records.glob("*.json"))

    def ended(self) -> list[str]:
        """Return the components that were started, were not stopped, and no longer run."""
        return [name for name in self.names() if self.running(name) is None]

    def running(self, name: str) -> psutil.Process | None:
        """Return the live process of a component."""
        record = self._record(name)
        if record is None:
            return None
        self._reap()
        try:
            process = psutil.Process(record.pid)
            same = abs(process.create_time() - record.create_time) < 0.05
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def start(
        self, name: str, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None
    ) -> bool:
        """Start a component unless it runs with the same arguments; return True if it did start."""
        words = [str(word) for word in argv]
        process = self.running(name)
        if process is not None:
            record = self._record(name)
            if record is not None and record.argv == words:
                return False
            self.stop([name])
        self._records.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        pid = _spawn([*self._tie(), *words], _environment(env), self.log_file(name))
        self._children.add(pid)
        created = psutil.Process(pid).create_time()
        draft = self._records / f".{name}.draft"
        draft.write_text(json.dumps(asdict(_Record(pid, created, words))))
        draft.replace(self._records / f"{name}.json")
        return True

    def await_ready(self, name: str, probe: Callable[[], bool], timeout_s: float) -> None:
        """Return once `probe` succeeds.

        Raises:
            PortInUse: the component ended because its port was taken.
            ComponentFailed: it ended, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ready = probe()
            # Checked after the probe: another process may have taken the port and answered.
            if self.running(name) is None:
                tail = self.log_tail(name)
                kind = PortInUse if "address already in use" in tail else ComponentFailed
                raise kind(f"{name} ended while starting; log ({self.log_file(name)}):\n{tail}")
            if ready:
                return
            if time.monotonic() > deadline:
                raise ComponentFailed(
                    f"{name} was not ready within {timeout_s:.0f} s; end of its log ({self.log_file(name)}):\n"
                    + self.log_tail(name)
                )
            time.sleep(POLL_S)

    def log_tail(self, name: str, lines: int = 15) -> str:
        """Return the last lines of a component's log."""
        path = self.log_file(name)
        if not path.exists():
            return "(no log)"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, names: Iterable[str], *, patience_s: float = 5.0) -> None:
        """Stop components in parallel: SIGTERM, a second one after 1 s, SIGKILL after `patience_s`.

        The second SIGTERM is for kube-apiserver, which otherwise waits a minute for open watches.
        """
        wanted = list(names)
        processes = {name: process for name in wanted if (process := self.running(name))}
        alive = list(processes.values())
        for sent, wait_s in ((signal.SIGTERM, 1.0), (signal.SIGTERM, patience_s - 1.0)):
            _send(alive, sent)
            alive = self._wait(alive, wait_s)
        _send(alive, signal.SIGKILL)
        alive = self._wait(alive, 10.0)
        if alive:
            raise LocalError(
                f"these processes cannot be stopped: {[process.pid for process in alive]}"
            )
        self._forget(wanted)

    def kill(self, names: Iterable[str]) -> None:
        """Stop components at once, with SIGKILL."""
        wanted = list(names)
        alive = [process for name in wanted if (process := self.running(name))]
        _send(alive, signal.SIGKILL)
        self._wait(alive, 10.0)
        self._forget(wanted)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            (self._records / f"{name}.json").unlink(missing_ok=True)

    def _wait(self, processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
        """Wait until the processes end, reaping our own children; return those still alive."""
        deadline = time.monotonic() + timeout_s
        while alive := [process for process in processes if _lives(process)]:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        self._reap()  # last, so that no process that ended just now stays a zombie
        return alive

    def _reap(self) -> None:
        """Reap our own children that have ended, so that no zombie stays."""
        for pid in list(self._children):
            try:
                ended = os.waitpid(pid, os.WNOHANG)[0] == pid
            except ChildProcessError:
                ended = True
            if ended:
                self._children.discard(pid)

    def _record(self, name: str) -> _Record | None:
        try:
            return _Record(**json.loads((self._records / f"{name}.json").read_text()))
        except (FileNotFoundError, json.JSONDecodeError, TypeError):
            return None  # missing or half-written: then there is no process to find

    def _tie(self) -> list[str]:
        if not self._tied:
            return []
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise LocalError("setpriv is not on the PATH; install util-linux")
        return [setpriv, "--pdeathsig", "KILL", "--"]


def _spawn(argv: list[str], env: dict[str, str], log: Path) -> int:
    """Start a program in a session of its own, its output appended to `log`; return its pid."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        return os.posix_spawnp(
            argv[0],
            argv,
            env,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
    except FileNotFoundError as error:
        raise LocalError(f"{argv[0]} is not on the PATH") from error


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    """Return a small environment: etcd and kubectl obey variables that the user's shell may set."""
    kept = {
        name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ
    }
    return {**kept, **(extra or {})}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(processes: Iterable[psutil.Process], which: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(which)
        except psutil.NoSuchProcess:
            continue
