"""Write the generated files; with --check, list those that differ from their source.

A generator is a function that returns {path: text}. To add one, append it to GENERATORS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

import reference_gateway
import reference_metrics
import reference_pages
import surface
import text_catalogue
from fleetkeeper.api.profiles import environment, metadata_names
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.schema import crd, reference
from fleetkeeper_engine import exit_codes, spec
from fleetkeeper_engine.supervisor.control_api import metric_table
from lanes import promises

ROOT = Path(__file__).resolve().parent.parent


def chart_crds() -> dict[str, str]:
    """Return the CRDs in the chart's directory; Helm reads nothing outside it."""
    return {
        f"charts/fleetkeeper/files/{name}": text
        for name, text in crd.generated_files().items()
        if name.startswith("crds/")
    }


def admission_names() -> dict[str, str]:
    """Return the names that the admission policies of the chart share with the operator."""
    names = {
        "administratorsVariables": environment.ADMINISTRATORS,
        "defaultMetadata": list(metadata_names.DEFAULT_ALLOWED),
        "defaultVariables": list(EngineProfile.model_fields["env"].default),
        "harmlessMetadata": list(metadata_names.HARMLESS),
        "harmlessVariables": sorted(environment.HARMLESS),
        "kubernetesMetadata": metadata_names.KUBERNETES,
    }
    head = "# Generated from the operator's code by `make generate`.\n"
    return {"charts/fleetkeeper/files/admission-names.yaml": head + yaml.safe_dump(names)}


GENERATORS: list[Callable[[], dict[str, str]]] = [
    crd.generated_files,
    chart_crds,
    admission_names,
    reference.generated_files,
    reference_pages.generated_files,
    reference_metrics.generated_files,
    reference_gateway.generated_files,
    text_catalogue.generated_files,
    spec.contract_files,
    exit_codes.contract_files,
    metric_table.contract_files,
    promises.generated_files,
    surface.generated_files,
]


def main() -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file differs"
    )
    check = parser.parse_args().check
    stale = []
    for generator in GENERATORS:
        for name, text in generator().items():
            path = ROOT / name
            if path.exists() and path.read_text() == text:
                continue
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    for name in stale:
        print(
            f"generate: {name} {'differs from its source; run `make generate`' if check else 'written'}"
        )
    if check and stale:
        sys.exit(1)


if __name__ == "__main__":
    main()
