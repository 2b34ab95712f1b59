"""System commands: output captured, time limited, failures as clear errors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fleetkeeper_local.common.errors import LocalError

TIMEOUT_S = 60.0


def run(*words: str | Path, input_text: str | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """Run a command and return its output.

    Raises:
        LocalError: it is missing, failed or timed out.
    """
    done = attempt(*words, input_text=input_text, timeout_s=timeout_s)
    if done.returncode:
        raise LocalError(
            f"`{_line(words)}` failed with exit code {done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout


def attempt(
    *words: str | Path, input_text: str | None = None, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a command whose failure is a valid result.

    Raises:
        LocalError: it is missing or timed out.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    try:
        return subprocess.run(
            [str(word) for word in words],
            input=input_text if input_text is not None else "",
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        raise LocalError(f"{words[0]} is not on the PATH") from error
    except subprocess.TimeoutExpired as error:
        raise LocalError(f"`{_line(words)}` timed out after {timeout_s:.0f} s") from error


def _line(words: Sequence[str | Path]) -> str:
    return " ".join(str(word) for word in words)
