"""vLLM's cached information about model classes, which an image build prepares.

Before an engine starts, vLLM imports itself in a separate process only to inspect the model's class
(ten seconds of a core), and keeps the answer in its cache directory. A new pod has none. An image
may therefore contain the answers (`inspect_models`), which are copied to where vLLM looks for its
own. Each carries a hash of the class's source, so vLLM ignores an answer for another version.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger("fleetkeeper.model_info_cache")

FOLDER = "modelinfos"
"""vLLM's name for it in its cache directory."""


def bundled_answers(prefix: Path | str = sys.prefix) -> Path:
    """Return where an image keeps its answers."""
    return Path(prefix) / "share" / "fleetkeeper" / FOLDER


def install_answers(environment: Mapping[str, str], source: Path) -> int:
    """Copy the answers that vLLM's cache directory lacks; return their number.

    vLLM inspects the class itself if a copy fails.
    """
    try:
        target = cache_directory(environment) / FOLDER
        answers = sorted(source.glob("*.json"))
        missing = [file for file in answers if not (target / file.name).exists()]
        for file in missing:
            target.mkdir(parents=True, exist_ok=True)
            # Another engine may start at the same time: a file must be complete or absent.
            made = target / f".{file.name}.{os.getpid()}"
            shutil.copyfile(file, made)
            made.replace(target / file.name)
    except (OSError, RuntimeError) as error:  # not writable; a user without a home directory
        logger.info("model information not copied, the start takes longer: %s", error)
        return 0
    return len(missing)


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Return where a vLLM with this environment keeps its cache."""
    if root := environment.get("VLLM_CACHE_ROOT"):
        return Path(root).expanduser()
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~") / ".cache"
    return Path(base).expanduser() / "vllm"
