"""Brings a Hugging Face model into the cache: run as a process of its own, before the memory is planned.

Prints the directory as its last line. What goes wrong is printed by huggingface_hub and classified
like any other output.
"""

from __future__ import annotations

import importlib
import sys

MARK = "fleetkeeper-fetched "
PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "tokenizer*"]


def main() -> None:
    """Downloads ORG/NAME at a revision."""
    repository, revision = sys.argv[1], sys.argv[2] or None
    hub = importlib.import_module("huggingface_hub")
    directory = hub.snapshot_download(repository, revision=revision, allow_patterns=PATTERNS)
    sys.stdout.write(f"{MARK}{directory}\n")


if __name__ == "__main__":
    main()
