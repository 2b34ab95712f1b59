"""What vLLM asks of a model's class before each start, asked once when the image is made.

Before an engine starts, vLLM imports itself in a process of its own, only to ask the model's class what
it can do (ten seconds of a core), and keeps the answer in its cache directory. A new pod has none. So
an image may bring the answers (`inspect_models`), and they are laid where vLLM looks for its own; each
carries a hash of the class's source, so vLLM leaves an answer for another version alone.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger("fleetkeeper.inspected")

FOLDER = "modelinfos"
"""As vLLM calls it in its cache directory."""


def brought(prefix: Path | str = sys.prefix) -> Path:
    """Where an image keeps the answers that it brings."""
    return Path(prefix) / "share" / "fleetkeeper" / FOLDER


def lay_out(environment: Mapping[str, str], source: Path) -> int:
    """Copies the answers that vLLM's cache directory lacks; returns how many.

    What cannot be copied is found out by vLLM itself.
    """
    try:
        target = cache_directory(environment) / FOLDER
        answers = sorted(source.glob("*.json"))
        missing = [file for file in answers if not (target / file.name).exists()]
        for file in missing:
            target.mkdir(parents=True, exist_ok=True)
            # Another engine may start beside this one: a file is there whole or not at all.
            made = target / f".{file.name}.{os.getpid()}"
            shutil.copyfile(file, made)
            made.replace(target / file.name)
    except (OSError, RuntimeError) as error:  # not writable; a user without a home directory
        logger.info("this start takes longer: %s", error)
        return 0
    return len(missing)


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where a vLLM of this environment keeps its cache."""
    if root := environment.get("VLLM_CACHE_ROOT"):
        return Path(root).expanduser()
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~") / ".cache"
    return Path(base).expanduser() / "vllm"
