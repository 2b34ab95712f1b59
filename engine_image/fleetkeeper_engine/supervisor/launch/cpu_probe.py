"""Probe of 16-bit products on this CPU: a separate process, because it may die.

Some machines advertise AMX and end a program with SIGILL at its first tile instruction. Neither
/proc/cpuinfo nor a hand-written tile program shows this. vLLM would become ready and die at its
first request.
"""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Multiply two 256 x 256 matrices of the given format; the exit status is the answer."""
    torch = importlib.import_module("torch")
    ones = torch.ones(256, 256, dtype=getattr(torch, sys.argv[1]))
    if float((ones @ ones)[0, 0]) != 256.0:
        sys.exit("the product is wrong")


if __name__ == "__main__":
    main()
