"""`make demo` and `make demo-down`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Self

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fleetkeeper.commands.fleet.top import fleet_table
from fleetkeeper.fleet.view import views_of
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import REPOSITORY, data_dir
from fleetkeeper_local.common.report import say
from fleetkeeper_local.demo import asleep, front_door, swap, waiting_work
from fleetkeeper_local.demo.cluster import Cluster, on_path
from fleetkeeper_local.demo.figure import Run, draw
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.front_door import FrontDoor
from fleetkeeper_local.demo.installation import (
    BATCH,
    GATEWAY,
    NAMESPACE,
    Installation,
    apply_example,
    ensure_namespace,
)
from fleetkeeper_local.demo.play import Play
from fleetkeeper_local.demo.record import (
    Moment,
    failed,
    inside,
    merged,
    moments_of_decisions,
    moments_of_events,
    page,
)
from fleetkeeper_local.demo.recorder import Recorder
from fleetkeeper_local.demo.scenario import SCENARIOS, EngineKind, Scenario
from fleetkeeper_local.demo.stage import GivenStage, LocalStage, Stage
from fleetkeeper_local.demo.traffic import measure_capacity
from fleetkeeper_local.demo.waiting_work import WaitingWork
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.node.flags import read_settings
from fleetkeeper_local.node.node import Node

TENANT = "fleetkeeper-demo"
SHARE_RATIO = 0.3
"""First load relative to one replica's capacity: four times as much exceeds one, but not two.

It exceeds one replica by at most a fifth. Where cores are scarce, waiting requests compete for
them with the engine that starts.
"""
LINE_EVERY_S = 5.0
MOMENTS_SHOWN = 6

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Out = Annotated[Path, typer.Option("--out", help="Directory of the report and the figure.")]


@app.command()
def up(
    out: Out = REPOSITORY / "out" / "demo",
    rate: Annotated[
        float | None,
        typer.Option(
            help=f"Requests per second in the first stage. Default: {SHARE_RATIO} x one replica's capacity.",
            min=0.1,
        ),
    ] = None,
    engines: Annotated[
        EngineKind,
        typer.Option(
            help="vllm: a tiny model on CPU. simulated: a surge to twenty simulated H100 GPUs."
        ),
    ] = EngineKind.VLLM,
) -> None:
    """Install everything, apply load, inject faults, and report what happened.

    This runs on the local node, or with DEMO_KUBECONFIG on an existing cluster. DEMO_VALUES then
    names a file of chart values with images that the cluster has or can pull.
    """
    began = time.monotonic()
    try:
        broken = _run(_stage(), SCENARIOS[engines], out, rate, began)
    except LocalError as error:
        typer.echo(f"demo: {error}", err=True)
        raise typer.Exit(1) from error
    if broken:
        typer.echo(f"demo: {broken} requests failed outside the frozen engine", err=True)
        raise typer.Exit(1)


@app.command()
def down() -> None:
    """Remove what the demo created: the local node, or its namespaces in an existing cluster."""
    try:
        if given := _given_cluster():
            text = _remove_namespaces(given)
        else:
            if data_dir().exists():
                Node(read_settings(data_dir())).down()
            text = "removed the demo"
    except LocalError as error:
        typer.echo(f"demo: {error}", err=True)
        raise typer.Exit(1) from error
    say(text)


def _remove_namespaces(cluster: Cluster) -> str:
    cluster.kubectl("delete", "namespace", TENANT, "--ignore-not-found")
    Installation(cluster).uninstall()
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
    return "removed the demo; the CRD stays, as the chart specifies"


def _given_cluster() -> Cluster | None:
    """Return the cluster that DEMO_KUBECONFIG names, for kubectl and Helm of the user."""
    given = os.environ.get("DEMO_KUBECONFIG")
    return Cluster(Path(given), on_path) if given else None


def _stage() -> Stage:
    given = _given_cluster()
    if given is None:
        return LocalStage(Node(read_settings(data_dir())))
    values = os.environ.get("DEMO_VALUES")
    if not values:
        raise LocalError(
            "DEMO_KUBECONFIG is set, so set DEMO_VALUES too: a values file of charts/fleetkeeper with "
            "images that the cluster has or can pull (docs/operations.md)"
        )
    return GivenStage(given, Path(values))


def _run(stage: Stage, scenario: Scenario, out: Path, rate: float | None, began: float) -> int:
    """Run the demo; return the number of failures that the frozen engine does not explain."""
    installation = stage.install(scenario.engines)
    ensure_namespace(stage.cluster, TENANT)
    if scenario.engines is EngineKind.VLLM:
        stage.put_model(TENANT)
    say(f"kubectl apply -f {scenario.example.relative_to(REPOSITORY)}")
    fleet = apply_example(stage.cluster, TENANT, scenario.example, scenario.name)
    fleet.said = say
    fleet.pin(1)  # also if the measurement below is too much for one replica
    ready_s = time.monotonic() - began
    say(f"the fleet is Ready ({ready_s:.0f} s after the start)")
    with (
        stage.reach(fleet.namespace, fleet.name) as url,
        Recorder(stage.cluster.kubeconfig, NAMESPACE, TENANT, fleet.name) as recorder,
        Show(recorder) as show,
        _waiting_work(stage, fleet, out / "batch") as work,
    ):
        address = f"{url}/v1"
        say("measuring the capacity of one replica")
        capacity = measure_capacity(address, fleet.name, scenario.shape)
        say(f"one replica answers {capacity:.1f} requests/s")
        first = rate or SHARE_RATIO * capacity
        parts = (stage, installation, fleet, address, first, show.update)
        play = Play(*parts, work=work, scenario=scenario)
        play.run()
        end_s = time.time()
        samples = play.samples()
        batch = _batch(work, samples)
        gateway = _front_door(stage, fleet, address)
    figure = out / "demo.png"
    run = Run(
        scenario.title,
        play.start_s,
        end_s,
        play.spans,
        recorder.observations,
        recorder.decisions,
        samples,
    )
    draw(run, figure)
    took_s = time.monotonic() - began
    text = page(
        scenario.title,
        start_s=play.start_s,
        moments=merged(play.moments, _told(fleet, recorder, play.start_s)),
        samples=samples,
        frozen=play.frozen_times(),
        notes=(
            *batch,
            *gateway,
            f"One replica answered {capacity:.1f} requests/s; x1 is {first:.1f}.",
            f"Ready {ready_s:.0f} s after the start; {took_s:.0f} s in total.",
            f"Figure: {figure}",
        ),
    )
    written = out / "demo.txt"
    written.write_text(text)
    typer.echo(text)
    typer.echo(f"This report is also in {written}")
    broken = failed(samples)
    return len(broken) - len(inside(broken, play.frozen_times()))


@contextmanager
def _waiting_work(stage: Stage, fleet: Fleet, folder: Path) -> Iterator[WaitingWork | None]:
    """Provide a batch to submit, with a key of its own; None without a batch process."""
    with stage.reach(NAMESPACE, BATCH) as url, stage.reach(NAMESPACE, GATEWAY) as gateway:
        if not (url and gateway):
            yield None
            return
        door = FrontDoor(stage.cluster, gateway, NAMESPACE)
        key = door.create_key(waiting_work.KEY, fleet.namespace, "--highest-tier=batch")
        yield WaitingWork(stage.cluster, NAMESPACE, url, key, fleet.name, folder)


def _batch(work: WaitingWork | None, samples: list[Sample]) -> list[str]:
    """Wait for the end of the batch; return its part of the report."""
    if work is None:
        return ["The values install no batches.", ""]
    say("batch: waiting for its last lines")
    lines = work.end(samples)
    for line in lines:
        say(f"batch: {line}")
    return ["A batch through the surge", "", *(f"  {line}" for line in lines), ""]


def _front_door(stage: Stage, fleet: Fleet, base_url: str) -> list[str]:
    """Run the chapter of the gateway; return its part of the report."""
    with stage.reach(NAMESPACE, GATEWAY) as address:
        if not address:
            return ["The values install no gateway.", ""]
        say("gateway: spec.access is Gateway from now on")
        front_door.set_access(fleet, "Gateway", base_url)
        door = FrontDoor(stage.cluster, address, NAMESPACE)
        lines = [
            "spec.access: Gateway. A request around the gateway gets status 401.",
            *front_door.chapter(door, fleet.namespace, fleet.name, say),
        ]
        slept = asleep.chapter(door, fleet, say)
        swapped = swap.chapter(door, fleet, say)
    return [
        *("The gateway", "", *(f"  {line}" for line in lines), ""),
        *("Asleep", "", *(f"  {line}" for line in slept), ""),
        *("Swap", "", *(f"  {line}" for line in swapped), ""),
    ]


def _told(fleet: Fleet, recorder: Recorder, since_s: float) -> list[Moment]:
    """Return what Fleetkeeper reported about the fleet since the load started."""
    return merged(
        moments_of_events(fleet.cluster.events(fleet.namespace, fleet.name), since_s),
        moments_of_decisions(recorder.decisions, since_s),
    )


class Show:
    """The live view: `fleetkeeper top` above, the load below; plain lines without a terminal."""

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


if __name__ == "__main__":
    app()
