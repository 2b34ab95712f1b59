"""`fleetkeeper-engine serve`: an engine without Kubernetes, with useful defaults."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetkeeper_engine.devices.interface import Accelerator
from fleetkeeper_engine.devices.kinds import KINDS
from fleetkeeper_engine.spec import CONTRACT

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the processes of an engine share memory there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument("--model", required=True, help="directory, or ORG/NAME on Hugging Face")
    parser.add_argument("--name", help="model name for clients; default: the directory's name")
    parser.add_argument(
        "--accelerator",
        choices=[accelerator.value for accelerator in Accelerator],
        help="default: cuda if a device is available",
    )
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"]
    )
    parser.add_argument(
        "--max-model-length", type=int, help="in tokens; default: the model's maximum, at most 8192"
    )
    parser.add_argument(
        "--memory-limit", type=_bytes, help="memory limit of the simulated pod, like 4Gi (cpu)"
    )
    parser.add_argument("--cap-percent", type=int, default=80)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=2048, help="per step")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--control-port", type=int, default=9090)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="listen address; 0.0.0.0 for every address of the machine",
    )
    parser.add_argument(
        "--control-keys",
        type=Path,
        help="directory with jwks.json: keys that may sign requests for limits",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="additional vLLM option; repeatable",
    )


def desired_document_text(args: argparse.Namespace) -> str:
    """Return the document that the arguments specify; `parse_document` validates it."""
    accelerator = args.accelerator or next(
        accelerator for accelerator, kind in KINDS.items() if not kind.missing()
    )
    source = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    options = dict(option.partition("=")[::2] for option in args.option)
    if accelerator == Accelerator.CPU:
        options.setdefault("enforce-eager", "true")
    document: dict[str, Any] = {
        "contract": CONTRACT,
        "accelerator": accelerator,
        "model": {"source": source, "servedName": args.name or Path(source).name},
        "engine": {
            "dtype": args.dtype,
            "maxModelLength": args.max_model_length or desired_length(Path(source)),
            "options": options,
        },
        "memory": {"capPercent": args.cap_percent, "limitBytes": args.memory_limit},
        "batching": {
            "maxSequences": args.max_sequences,
            "minSequences": 1,
            "maxTokens": args.max_tokens,
            "minTokens": min(256, args.max_tokens),
        },
        "drain": {"seconds": 30, "noticeSeconds": 0},
        "ports": {"host": args.host, "serving": args.port, "control": args.control_port},
    }
    if args.control_keys is not None:
        document["control"] = {"keysDirectory": str(args.control_keys.resolve())}
    return json.dumps(document)


def desired_length(directory: Path) -> int | None:
    """Return the model's own length, at most 8192; None if its config is absent or does not name one."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return None
    length = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return min(length, 8192) if isinstance(length, int) else None


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """Create a directory in shared memory for this run, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="fleetkeeper-", dir=SHARED_MEMORY) as name:
        yield Path(name)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"invalid amount of memory {text!r}; use a value like 4Gi")
    factor = 1024 ** ["", "Ki", "Mi", "Gi", "Ti"].index(found[2] or "")
    return int(float(found[1]) * factor)
