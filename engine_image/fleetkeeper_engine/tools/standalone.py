"""`fleetkeeper-engine serve`: an engine without Kubernetes, with sane defaults."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetkeeper_engine.spec import CONTRACT
from fleetkeeper_engine.supervisor.memory.nvml import load_nvml

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the page is memory that processes share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words of `serve`."""
    parser.add_argument("--model", required=True, help="a directory, or ORG/NAME on Hugging Face")
    parser.add_argument("--name", help="the name clients use; default: the directory's")
    parser.add_argument(
        "--accelerator", choices=["cuda", "cpu"], help="default: cuda when there is one"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"]
    )
    parser.add_argument(
        "--max-model-length", type=int, help="tokens; default: the model's own, at most 8192"
    )
    parser.add_argument(
        "--memory-limit", type=_bytes, help="of the pod that this stands for, like 4Gi (cpu)"
    )
    parser.add_argument("--cap-percent", type=int, default=80)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of one step")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--control-port", type=int, default=9090)
    parser.add_argument(
        "--host", default="127.0.0.1", help="loopback, or every address of the machine: 0.0.0.0"
    )
    parser.add_argument(
        "--control-keys", type=Path, help="a directory with jwks.json: whose orders are taken"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="a further vLLM option"
    )


def desired_document_text(given: argparse.Namespace) -> str:
    """The document that the words amount to; the parser of documents judges it."""
    accelerator = given.accelerator or ("cuda" if load_nvml() else "cpu")
    source = str(Path(given.model).resolve()) if Path(given.model).is_dir() else given.model
    options = dict(option.partition("=")[::2] for option in given.option)
    if accelerator == "cpu":
        options.setdefault("enforce-eager", "true")
    document: dict[str, Any] = {
        "contract": CONTRACT,
        "accelerator": accelerator,
        "model": {"source": source, "servedName": given.name or Path(source).name},
        "engine": {
            "dtype": given.dtype,
            "maxModelLength": given.max_model_length or desired_length(Path(source)),
            "options": options,
        },
        "memory": {"capPercent": given.cap_percent, "limitBytes": given.memory_limit},
        "batching": {
            "maxSequences": given.max_sequences,
            "minSequences": 1,
            "maxTokens": given.max_tokens,
            "minTokens": min(256, given.max_tokens),
        },
        "drain": {"seconds": 30, "noticeSeconds": 0},
        "ports": {"host": given.host, "serving": given.port, "control": given.control_port},
    }
    if given.control_keys is not None:
        document["control"] = {"keysDirectory": str(given.control_keys.resolve())}
    return json.dumps(document)


def desired_length(directory: Path) -> int | None:
    """The model's own length, at most 8192; None when its config does not say (or is not here)."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return None
    length = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return min(length, 8192) if isinstance(length, int) else None


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A directory in shared memory for this run alone."""
    with tempfile.TemporaryDirectory(prefix="fleetkeeper-", dir=SHARED_MEMORY) as name:
        yield Path(name)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory; write it like 4Gi")
    factor = 1024 ** ["", "Ki", "Mi", "Gi", "Ti"].index(found[2] or "")
    return int(float(found[1]) * factor)
