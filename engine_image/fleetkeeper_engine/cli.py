"""`fleetkeeper-engine`: the supervisor of one vLLM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.spec import (
    EngineDocument,
    InvalidDocumentError,
    parse_document,
    read_document,
)
from fleetkeeper_engine.supervisor.drain_socket import DRAIN_SOCKET
from fleetkeeper_engine.supervisor.launch.downloads import download_models
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.output import Outlet, logging_through
from fleetkeeper_engine.supervisor.process import Reaper
from fleetkeeper_engine.supervisor.supervisor import Supervisor
from fleetkeeper_engine.supervisor.termination import Death
from fleetkeeper_engine.tools import doctor, install, signing_tool, standalone

RUN_ENVIRONMENT = "FLEETKEEPER_RUN"
DEFAULT_RUN = "/dev/shm/fleetkeeper"  # noqa: S108 - memory shared by the processes of one pod, 0700
TERMINATION_ENVIRONMENT = "FLEETKEEPER_TERMINATION_LOG"
DEFAULT_TERMINATION = "/dev/termination-log"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit the process with its status."""
    parser = argparse.ArgumentParser(prog="fleetkeeper-engine", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser(
        "run", help="supervise the engine that FLEETKEEPER_ENGINE specifies (default)"
    )
    standalone.add_arguments(
        commands.add_parser("serve", help="supervise an engine without Kubernetes")
    )
    commands.add_parser(
        "fetch", help="download the models that FLEETKEEPER_ENGINE names, and start no engine"
    )
    commands.add_parser("drain", help="drain the engine of this pod, then stop it (preStop)")
    doctor.add_arguments(
        commands.add_parser(
            "doctor", help="show the environment and the command that would start vLLM"
        )
    )
    install.add_arguments(commands.add_parser("install", help="copy this package into a directory"))
    signing_tool.add_keys_arguments(
        commands.add_parser("keys", help="create a key pair that signs requests for limits")
    )
    signing_tool.add_limits_arguments(
        commands.add_parser("limits", help="send a request for live limits, signed with that key")
    )
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s fleetkeeper %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    sys.exit(_run(args))


def _run(args: argparse.Namespace) -> int:
    commands: dict[str | None, Callable[[argparse.Namespace], int]] = {
        "serve": _serve,
        "fetch": _fetch,
        "drain": _ask_to_drain,
        "doctor": doctor.run,
        "install": install.run,
        "keys": signing_tool.make_keys,
        "limits": signing_tool.send_limits_request,
    }
    return commands.get(args.command, _run_pod)(args)


def _run_pod(_given: argparse.Namespace) -> int:
    return supervise(None, os.environ, _run_directory(os.environ))


def _serve(args: argparse.Namespace) -> int:
    with standalone.run_directory() as directory:
        return supervise(standalone.desired_document_text(args), os.environ, directory)


def _fetch(_given: argparse.Namespace) -> int:
    # Pid 1 of a container ignores a SIGTERM without a handler. The download ends with its parent.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    return fetch_models(os.environ)


def fetch_models(environment: Mapping[str, str]) -> int:
    """Download the models of the document; return 0 or, with a termination line, the code of the failure."""
    try:
        document = read_document(environment)
        asyncio.run(_download(document, environment))
    except InvalidDocumentError as error:
        return _report(Death(DeathClass.BAD_ENGINE_OPTION, str(error), "document"), environment)
    except StartRefusedError as error:
        return _report(Death(error.death, str(error), error.phase), environment)
    return 0


async def _download(document: EngineDocument, environment: Mapping[str, str]) -> None:
    reaper = Reaper(output=1)
    reaper.start()
    try:
        await download_models(document, environment, reaper.spawn)
    finally:
        reaper.stop()


def _ask_to_drain(_given: argparse.Namespace) -> int:
    return asyncio.run(_drain(_run_directory(os.environ)))


def supervise(text: str | None, environment: Mapping[str, str], run_directory: Path) -> int:
    """Run an engine to its end.

    Args:
        text: the document; None reads it from the environment.
        environment: of this process.
        run_directory: for shared memory, the drain socket and start measurements; created if
            absent.

    Returns:
        The exit code: 0 after a drain, else the code of the engine's end.
    """
    output, log = Outlet(1), Outlet(2)
    with logging_through(log):
        code = _supervise(text, environment, run_directory, (output, log))
        output.flush()
    return code


def _supervise(
    text: str | None,
    environment: Mapping[str, str],
    run_directory: Path,
    outlets: tuple[Outlet, Outlet],
) -> int:
    try:
        document = read_document(environment) if text is None else parse_document(text)
    except InvalidDocumentError as error:
        return _report(Death(DeathClass.BAD_ENGINE_OPTION, str(error), "document"), environment)
    run_directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def run() -> Death | None:
        return await Supervisor(document, environment, run_directory, outlets).run()

    death = asyncio.run(run())
    return 0 if death is None else _report(death, environment)


def _report(death: Death, environment: Mapping[str, str]) -> int:
    """Write one line to stderr, and one JSON line to the termination log."""
    logging.getLogger("fleetkeeper").error("%s: %s", death.death.value, death.message)
    path = Path(environment.get(TERMINATION_ENVIRONMENT) or DEFAULT_TERMINATION)
    if TERMINATION_ENVIRONMENT not in environment and not path.exists():
        return death.code  # without Kubernetes there is no kubelet to read it
    try:
        path.write_text(death.termination_line() + "\n")
    except OSError as error:
        logging.getLogger("fleetkeeper").warning("termination log not written: %s", error)
    return death.code


async def _drain(run_directory: Path) -> int:
    path = run_directory / DRAIN_SOCKET
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        print(f"fleetkeeper-engine drain: no supervisor at {path}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    writer.write(b"drain\n")
    await writer.drain()
    answer = await reader.readline()
    writer.close()
    return 0 if answer.strip() == b"drained" else 1


def _run_directory(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(RUN_ENVIRONMENT) or DEFAULT_RUN)


if __name__ == "__main__":
    main()
