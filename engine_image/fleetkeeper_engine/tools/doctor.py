"""`fleetkeeper-engine doctor`: the environment, the memory plan and the command that would start vLLM."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from fleetkeeper_engine.devices.cgroup import Cgroup, read_cpu_quota
from fleetkeeper_engine.devices.kinds import KINDS
from fleetkeeper_engine.spec import (
    ENVIRONMENT,
    EngineDocument,
    InvalidDocumentError,
    parse_document,
)
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.features import find_features
from fleetkeeper_engine.supervisor.launch.memory_plan import GIB
from fleetkeeper_engine.supervisor.launch.prepare import prepare
from fleetkeeper_engine.supervisor.launch.prepared import pod_limit_bytes
from fleetkeeper_engine.supervisor.process import Reaper
from fleetkeeper_engine.tools import standalone

Say = Callable[[str], object]
NAMES_SHOWN = ("PATH", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "HF_HUB_OFFLINE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`: those of `serve`, with an optional model."""
    standalone.add_arguments(parser)
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to relax an option
        if action.dest == "model":
            action.required = False


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 0 if an engine could be started."""

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")

    healthy = _say_machine(say)
    text = standalone.desired_document_text(args) if args.model else os.environ.get(ENVIRONMENT)
    if not text:
        say(
            "document     none: pass --model or set FLEETKEEPER_ENGINE to see the command that would start vLLM"
        )
        return 0 if healthy else 1
    try:
        document = parse_document(text)
        asyncio.run(_say_start(document, os.environ, say))
    except InvalidDocumentError as error:
        say(f"document     {error}")
        return 1
    except StartRefusedError as error:
        say(f"start        refused, {error.death}: {error}")
        return 1
    return 0 if healthy else 1


def _say_machine(say: Say) -> bool:
    say(f"python       {sys.version.split()[0]} ({sys.executable})")
    try:
        features = find_features()
    except StartRefusedError as error:
        say(f"vllm         {error}")
        return False
    say(f"vllm         {features.vllm_version} in {features.package}, server {features.entry}")
    for name in ("torch", "pydantic", "aiohttp", "PyJWT"):
        say(f"{name:<12} {_version(name)}")
    _say_devices(say)
    group = Cgroup.of_this_process()
    if group is None:
        say("cgroup       no memory controller: memory is measured per process")
    else:
        limit = group.limit_bytes()
        limit_text = f"limit {limit / GIB:.2f} GiB" if limit else "no limit"
        say(
            f"cgroup       v{group.version}, {group.used_bytes() / GIB:.2f} GiB in use, {limit_text}"
        )
    quota = read_cpu_quota()
    say(f"cpus         {os.cpu_count()}, quota {'none' if quota is None else f'{quota:g}'}")
    return True


def _say_devices(say: Say) -> None:
    for kind in KINDS.values():
        if not kind.capabilities.own_memory:
            continue
        if missing := kind.missing():
            say(f"{kind.name:<12} {missing}: accelerator cpu only")
            continue
        for index, device in enumerate(kind.open(os.environ, None, 0).read()):
            say(
                f"{kind.name} {index:<5} {device.used_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB in use"
            )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


async def _say_start(document: EngineDocument, environment: Mapping[str, str], say: Say) -> None:
    reaper = Reaper(output=2)
    reaper.start()
    with tempfile.TemporaryDirectory() as name:
        prepared = await prepare(document, environment, Path(name), reaper.spawn)
    reaper.stop()
    say(f"pod memory   {pod_limit_bytes(document) / GIB:.2f} GiB")
    say(f"memory plan  {prepared.plan.explanation}")
    say(f"command      {shlex.join(prepared.argv)}")
    shown = {
        name: prepared.environment[name] for name in NAMES_SHOWN if name in prepared.environment
    }
    say(f"environment  {' '.join(f'{name}={value}' for name, value in shown.items())}")
