"""`fleetkeeper local`: a real Kubernetes on this machine, started and removed with one command."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from fleetkeeper_local import existing_cluster, image_commands
from fleetkeeper_local.common import lock
from fleetkeeper_local.common.command_line import Dir, failure, orderly
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.report import say
from fleetkeeper_local.control_plane import control_plane
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.processes import Processes
from fleetkeeper_local.control_plane.program_table import ON_DEMAND, ONLY_TESTS, PROGRAMS
from fleetkeeper_local.control_plane.programs import build_programs, program_path
from fleetkeeper_local.node import flags
from fleetkeeper_local.node.node import Node
from fleetkeeper_local.node.settings import NodeSettings

app = typer.Typer(
    help="A real single-node Kubernetes on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

MARK = "control-plane-only"
"""Name of the file that marks a data directory without a node."""


@app.command()
def up(
    *,
    directory: Dir,
    control_plane_only: Annotated[
        bool,
        typer.Option(
            "--control-plane-only",
            help="API server, controllers and scheduler only: no root, no containers.",
        ),
    ] = False,
    gpu_nodes: Annotated[
        int, typer.Option(help="Fake nodes to add (kwok), each with 8 GPUs.", min=0)
    ] = 0,
    api_port: Annotated[int, typer.Option(help="Port of the API server.")] = NodeSettings.api_port,
    registry_port: Annotated[
        int, typer.Option(help="Port of the image registry.")
    ] = NodeSettings.registry_port,
    prometheus_port: Annotated[
        int, typer.Option(help="Port of Prometheus.")
    ] = NodeSettings.prometheus_port,
    bridge: Annotated[str, typer.Option(help="Name of the bridge.")] = NodeSettings.bridge,
    pod_cidr: Annotated[str, typer.Option(help="Network of the pods.")] = NodeSettings.pod_cidr,
    prometheus: Annotated[bool, typer.Option(help="Run Prometheus.")] = True,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            help="Use an existing cluster (kind, minikube, a remote one). It is inspected and "
            "recorded; nothing is started here or changed there.",
        ),
    ] = None,
) -> None:
    """Start the cluster, or those of its components that are not running."""
    began = time.monotonic()
    if kubeconfig is not None:
        orderly(lambda: _take_given(directory, kubeconfig))
        return
    orderly(lambda: _refuse_given(directory))
    if control_plane_only:
        plane = orderly(lambda: _up_plane(directory))
    else:
        settings = NodeSettings(
            directory=directory,
            bridge=bridge,
            pod_cidr=pod_cidr,
            api_port=api_port,
            registry_port=registry_port,
            prometheus_port=prometheus_port,
            prometheus=prometheus,
        )
        plane = orderly(lambda: _up_node(settings))
    if gpu_nodes:
        orderly(lambda: plane.ensure_nodes(gpu_nodes))
    say(
        f"ready in {time.monotonic() - began:.1f} s; to use it: export KUBECONFIG={plane.kubeconfig}"
    )


@app.command()
def down(
    directory: Dir,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also remove the images and the data directory.")
    ] = False,
) -> None:
    """Stop and remove the cluster; keep its images for the next start."""
    if not directory.exists():
        say(f"nothing to remove: {directory} does not exist")
        return
    if _given(directory):
        existing_cluster.forget(directory)
        say("removed the record of the cluster; the cluster itself is unchanged")
        return
    if _is_plane_only(directory):
        orderly(lambda: control_plane.remove(directory))
    else:
        orderly(lambda: Node(_settings(directory)).down(purge=purge))
    say("removed")


@app.command()
def status(directory: Dir) -> None:
    """Show the components; exit with code 0 if all of them are running."""
    if path := _given(directory):
        for line in existing_cluster.lines_of(
            orderly(lambda: existing_cluster.observe_cluster(path))
        ):
            typer.echo(line)
        return
    processes = Processes(directory, tied=False)
    names = processes.names()
    if not names:
        typer.echo(f"no cluster runs in {directory}")
        raise typer.Exit(1)
    alive = True
    for name in names:
        process = processes.running(name)
        alive = alive and process is not None
        typer.echo(f"{name:26} {_described(process)}")
    if _is_plane_only(directory):
        plane = ControlPlane(directory, tied=False)
        typer.echo(f"API         {plane.apiserver_url}")
        typer.echo("pods        scheduled to fake nodes only (no container runtime)")
    else:
        settings = _settings(directory)
        plane = Node(settings).plane
        typer.echo(f"API         {plane.apiserver_url}")
        typer.echo(f"registry    localhost:{settings.registry_port}")
        typer.echo(f"Prometheus  {Node(settings).prometheus_url}")
        typer.echo("NetworkPolicy objects are stored but NOT enforced on this node")
    typer.echo(f"kubeconfig  {plane.kubeconfig}")
    if not alive:
        typer.echo("some components are not running; start them with: fleetkeeper local up")
        raise typer.Exit(1)


@app.command()
def logs(
    component: Annotated[str, typer.Argument(help="kubelet, kube-apiserver, etcd, ...")],
    directory: Dir,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Number of lines to print, from the end.")
    ] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines.")
    ] = False,
) -> None:
    """Print the log of a component."""
    processes = Processes(directory, tied=False)
    path = processes.log_file(component)
    if not path.exists():
        known = ", ".join(sorted(log.stem for log in path.parent.glob("*.log"))) or "none"
        raise failure(f"no log of {component!r} in {directory}; available: {known}")
    if follow:
        subprocess.run(["tail", "-n", str(lines), "-F", str(path)], check=False)
        return
    typer.echo(processes.log_tail(component, lines))


@app.command()
def kubeconfig(directory: Dir) -> None:
    """Print the path of the administrator's kubeconfig."""
    path = _given(directory) or ControlPlane(directory, tied=False).kubeconfig
    if not path.exists():
        raise failure(f"no cluster was started in {directory}; run: fleetkeeper local up")
    typer.echo(path)


app.command("load-image")(image_commands.load_image)


@app.command()
def build(
    *,
    demo: Annotated[
        bool, typer.Option("--demo", help="Only what the demo uses, nothing for tests.")
    ] = False,
) -> None:
    """Build the programs of the cluster in parallel; skip those that are built already."""
    left_out = ON_DEMAND | ONLY_TESTS if demo else ON_DEMAND
    orderly(lambda: build_programs(PROGRAMS.keys() - left_out))


app.command("images")(image_commands.build_images)
app.command()(image_commands.push)


@app.command()
def program(
    name: Annotated[str, typer.Argument(help="kubectl, helm, kwok, prometheus, ...")],
) -> None:
    """Print the path of a program of the cluster; build it if necessary."""
    typer.echo(orderly(lambda: program_path(name)))


def _take_given(directory: Path, kubeconfig: Path) -> None:
    if Processes(directory, tied=False).names():
        raise LocalError(
            f"{directory} holds a cluster of `fleetkeeper local`; remove it (fleetkeeper local down "
            f"--dir {directory}) or choose another --dir"
        )
    cluster = existing_cluster.observe_cluster(kubeconfig.expanduser().resolve())
    existing_cluster.remember(directory, cluster)
    for line in existing_cluster.lines_of(cluster):
        typer.echo(line)
    say(f"to use it: export KUBECONFIG={cluster.kubeconfig}")


def _refuse_given(directory: Path) -> None:
    if path := existing_cluster.remembered(directory):
        raise LocalError(
            f"{directory} records the existing cluster of {path}; remove the record first (fleetkeeper local down "
            f"--dir {directory}) or choose another --dir"
        )


def _given(directory: Path) -> Path | None:
    return orderly(lambda: existing_cluster.remembered(directory))


def _up_plane(directory: Path) -> ControlPlane:
    lock.claim_folder(directory)
    with lock.exclusive(directory):
        if lock.machine_owner() == directory.resolve():
            raise LocalError(f"{directory} holds a node; choose another directory with --dir")
        (directory / MARK).touch()
        return ControlPlane(directory, tied=False).start()


def _up_node(settings: NodeSettings) -> ControlPlane:
    if _is_plane_only(settings.directory):
        raise LocalError(
            f"{settings.directory} holds a control plane without a node; remove it "
            f"(fleetkeeper local down --dir {settings.directory}) or choose another --dir"
        )
    node = Node(settings)
    if not node.up():
        say("all components are running already")
    return node.plane


def _is_plane_only(directory: Path) -> bool:
    return (directory / MARK).exists()


def _settings(directory: Path) -> NodeSettings:
    return flags.read_settings(directory)


def _described(process: psutil.Process | None) -> str:
    if process is None:
        return "not running"
    memory_mib = process.memory_info().rss / 1024**2
    age_s = time.time() - process.create_time()
    return f"pid {process.pid:<8} {memory_mib:5.0f} MiB  up {age_s:.0f} s"
