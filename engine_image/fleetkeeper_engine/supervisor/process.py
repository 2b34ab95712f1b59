"""Child processes of pid 1: each in its own session, output copied, orphans reaped."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from fleetkeeper_engine.supervisor.output import Outlet

KEPT_LINES = 400
KEPT_LINE_BYTES = 2000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Child:
    """A running process. `ended` completes with its exit status; a negative status is a signal."""

    def __init__(self, process: subprocess.Popen[bytes], ended: asyncio.Future[int]) -> None:
        self._process = process
        self.ended = ended
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.tee: asyncio.Task[None] | None = None
        """Ends when the last byte of the output was read."""

    @property
    def pid(self) -> int:
        """Return the process id, which is also the id of its session and process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether it has not been reaped."""
        return not self.ended.done()

    def terminate(self) -> None:
        """Send SIGTERM to the process alone: vLLM stops its own children."""
        self._signal(os.kill, signal.SIGTERM)

    def kill_session(self) -> None:
        """Send SIGKILL to the process and everything it started that stayed in its group."""
        self._signal(os.killpg, signal.SIGKILL)

    def _signal(self, send: Callable[[int, int], None], number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            send(self.pid, number)


class Reaper:
    """Parent of the child processes; reaps them and every orphan that the kernel hands to this process."""

    def __init__(self, output: Outlet | int = 1) -> None:
        self._output = Outlet(output) if isinstance(output, int) else output
        self._children: dict[int, tuple[subprocess.Popen[bytes], asyncio.Future[int]]] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)

    def start(self) -> None:
        """Handle SIGCHLD in the running loop, and adopt orphans below this process."""
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)

    def stop(self) -> None:
        """Stop handling SIGCHLD."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    async def spawn(self, argv: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a program in its own session, with its output copied to ours and kept line by line.

        Raises:
            OSError: if it cannot be started.
        """
        loop = asyncio.get_running_loop()
        process = self._launch(argv, environment)
        ended: asyncio.Future[int] = loop.create_future()
        self._children[process.pid] = (process, ended)
        child = Child(process, ended)
        reader = asyncio.StreamReader(limit=2**20)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        child.tee = loop.create_task(self._tee(reader, child))
        # It may have ended before it was registered, after its SIGCHLD was handled.
        self.reap()
        return child

    def _launch(
        self, argv: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # One prctl between fork and exec, no allocation: if the supervisor ends, the engine
            # ends too.
            preexec_fn=self._die_with_parent,  # noqa: PLW1509
        )

    def reap(self) -> None:
        """Reap every ended process below this one."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            known = self._children.pop(pid, None)
            if known is None:
                continue
            process, ended = known
            process.returncode = os.waitstatus_to_exitcode(status)
            if not ended.done():
                ended.set_result(process.returncode)

    def _die_with_parent(self) -> None:
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    async def _tee(self, reader: asyncio.StreamReader, child: Child) -> None:
        rest = b""
        while chunk := await reader.read(65_536):
            self._output.write(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-KEPT_LINE_BYTES:]
            child.lines.extend(_text(line) for line in lines)
        if rest:
            child.lines.append(_text(rest))


def _text(line: bytes) -> str:
    return line[:KEPT_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
