"""Download of a Hugging Face model into the cache: a separate process, before the memory is planned.

Prints the directory as its last line. huggingface_hub prints any error, which is classified like
other output.
"""

from __future__ import annotations

import importlib
import sys

MARK = "fleetkeeper-fetched "
PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "tokenizer*"]


def main() -> None:
    """Download ORG/NAME at a revision."""
    repository, revision = sys.argv[1], sys.argv[2] or None
    hub = importlib.import_module("huggingface_hub")
    directory = hub.snapshot_download(repository, revision=revision, allow_patterns=PATTERNS)
    sys.stdout.write(f"{MARK}{directory}\n")


if __name__ == "__main__":
    main()
