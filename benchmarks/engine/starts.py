"""The stages of an engine's start on CPU, with a cold and a warm page cache, forked and spawned.

    .venv/bin/python benchmarks/engine/starts.py [--rounds 3]

It needs root, to drop the page cache of the machine. The supervisor and vLLM are those of a pod, on the tiny
model and without Kubernetes. The variants alternate. Writes a section of RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from results_page import markdown_table, measured_on, write_section  # noqa: E402
from run import TITLE  # noqa: E402

from fleetkeeper_engine.supervisor.start_stages import StartStage  # noqa: E402
from tests.support.engine.engine_environment import make_tiny_model  # noqa: E402
from tests.support.engine.signer import Signer  # noqa: E402
from tests.support.engine.supervised_engine import desired_document, start_engine  # noqa: E402

HEADING = "The stages of a start"


class Variant(NamedTuple):
    """How an engine starts."""

    name: str
    is_cold: bool
    environment: Mapping[str, str]


SPAWN: Final = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
VARIANTS: Final = (
    Variant("spawned as by vLLM, cold", True, SPAWN),
    Variant("spawned as by vLLM, warm", False, SPAWN),
    Variant("forked (the default), cold", True, {}),
    Variant("forked (the default), warm", False, {}),
)


def measure(variant: Variant, model: Path, directory: Path) -> dict[str, float]:
    """Start an engine once, and return the seconds of its stages, and of the processors."""
    if variant.is_cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    signer = Signer(directory / "keys")
    document = desired_document(model, signer.directory)
    engine = start_engine(document, signer, directory, environment=variant.environment)
    try:
        engine.wait_ready()
        metrics = engine.metrics()
        found = {
            str(stage): metrics[f'fleetkeeper_start_seconds{{stage="{stage}"}}']
            for stage in StartStage
        }
        family = psutil.Process(engine.process.pid)
        times = [each.cpu_times() for each in (family, *family.children(recursive=True))]
        # User and system, also of reaped children. The next field is the wait for I/O.
        processors = sum(sum(each[:4]) for each in times)
        return {**found, "all": sum(found.values()), "processors": processors}
    finally:
        engine.stop()


def table(figures: Mapping[str, Iterable[Mapping[str, float]]]) -> str:
    """Return a row for each variant: medians, and the range of the whole start."""
    rows = []
    for name, rounds in figures.items():
        found = list(rounds)
        middle = {key: median(each[key] for each in found) for key in found[0]}
        whole = [each["all"] for each in found]
        rows.append(
            [
                name,
                *(f"{middle[stage]:.1f} s" for stage in StartStage),
                f"{middle['all']:.1f} s ({min(whole):.1f} to {max(whole):.1f})",
                f"{middle['processors']:.1f} s",
            ]
        )
    headings = ["", "processes and weights", "KV cache, API server", "first tokens", "start", "processor time"]  # fmt: skip
    return markdown_table(headings, rows)


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    if os.geteuid() != 0:
        parser.error("dropping the page cache needs root; run it with sudo")
    figures: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "model")
        for number in range(rounds):
            for place, variant in enumerate(VARIANTS):
                found = measure(variant, model, Path(name) / f"{number}-{place}")
                figures[variant.name].append(found)
                print(variant.name, found, flush=True)
    text = (
        "From the start of the container to the ready pod, by the metric `fleetkeeper_start_seconds`: the "
        "supervisor with vLLM on the tiny model, eager mode. Cold: the page cache of the machine is dropped "
        "before the start, as after a long sleep on a busy node. Spawned: each of vLLM's three processes "
        "imports torch and vLLM; forked: one does "
        "([ADR 42](../../docs/adr/0042-engines-on-cpu-fork.md)). On CUDA, vLLM forks by itself. "
        f"Medians of {rounds} rounds, which alternate."
    )
    section = "\n\n".join(["    .venv/bin/python benchmarks/engine/starts.py", text, table(figures), measured_on()])  # fmt: skip
    write_section(HEADING, section, HERE / "RESULTS.md", TITLE)
    print(section)


if __name__ == "__main__":
    main()
