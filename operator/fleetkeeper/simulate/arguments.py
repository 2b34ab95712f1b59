"""Parsers of the short texts that describe a comparison: alternatives, what-ifs, faults, tiers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import yaml

from fleetkeeper.simulate.loads.patterns import Pattern


class BadArgument(ValueError):
    """A text that is not understood. The message quotes it and says what is expected."""


class Kind(StrEnum):
    """The autoscalers of a comparison."""

    FLEETKEEPER = "fleetkeeper"
    HPA_CONCURRENCY = "hpa-concurrency"
    HPA_WAITING = "hpa-waiting"
    STATIC = "static"
    ADVISORY = "advisory"

    @property
    def is_stock(self) -> bool:
        """Return whether its engines are stock vLLM: no tiers, no queue limits, no live limits."""
        return self not in {Kind.FLEETKEEPER, Kind.ADVISORY}


_NUMBERED: Final = {Kind.HPA_CONCURRENCY, Kind.HPA_WAITING, Kind.STATIC}
MIN_TOKENS: Final = 64
MAX_STATIC: Final = 1000
AGAINST: Final = (
    "hpa-concurrency:N, hpa-waiting:N, static:N or advisory, each with @TOKENS if wanted"
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """An autoscaler to compare."""

    name: str
    kind: Kind
    number: float = 0.0
    """Its target or its replicas."""
    tokens: int | None = None
    """Tokens of a step (None: the spec's)."""


FLEETKEEPER: Final = Alternative("fleetkeeper", Kind.FLEETKEEPER)


def parse_alternatives(text: str) -> tuple[Alternative, ...]:
    """Return the alternatives in a list such as `hpa-concurrency:40,static:4@512,advisory`."""
    found = tuple(_alternative(part.strip()) for part in text.split(",") if part.strip())
    names = [alternative.name for alternative in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadArgument(f"{twice!r} is given twice")
    return found


def _alternative(text: str) -> Alternative:
    name, at, budget = text.partition("@")
    word, colon, number = name.partition(":")
    try:
        kind = Kind(word)
    except ValueError:
        raise BadArgument(f"{text!r} is unknown; use {AGAINST}") from None
    if kind is Kind.FLEETKEEPER:
        raise BadArgument("'fleetkeeper' is always compared; leave it out")
    if bool(colon) != (kind in _NUMBERED):
        raise BadArgument(f"{text!r} must be {AGAINST}")
    tokens = None
    if at:
        tokens = int(_positive(text, budget, whole=True))
        if tokens < MIN_TOKENS:
            raise BadArgument(f"{text!r}: a step has at least {MIN_TOKENS} tokens")
    value = _positive(text, number, whole=kind is Kind.STATIC) if colon else 0.0
    if kind is Kind.STATIC and value > MAX_STATIC:
        raise BadArgument(f"{text!r}: at most {MAX_STATIC} replicas can be simulated")
    return Alternative(text, kind, value, tokens)


def _positive(text: str, number: str, *, whole: bool) -> float:
    wrong = f"{text!r}: {number!r} must be a {'whole ' * whole}number above 0"
    try:
        value = float(number)
    except ValueError:
        raise BadArgument(wrong) from None
    if not 0 < value < math.inf or (whole and not value.is_integer()):
        raise BadArgument(wrong)
    return value


_PATH: Final = re.compile(r"[a-z][A-Za-z0-9]*(\.[a-z][A-Za-z0-9]*)*")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A field of the spec (`scaling.maxReplicas`), and a value for it."""

    path: tuple[str, ...]
    value: Any
    text: str
    """The field and the value as in the report."""


def parse_what_ifs(texts: Iterable[str]) -> tuple[WhatIf, ...]:
    """Return one what-if per value of texts such as `scaling.maxReplicas=8,16`."""
    found: list[WhatIf] = []
    for text in texts:
        path, equals, values = text.partition("=")
        path = path.strip().removeprefix("spec.")
        if not equals or not _PATH.fullmatch(path) or not values.strip():
            raise BadArgument(
                f"{text!r} must be FIELD=VALUE[,VALUE...], for example scaling.maxReplicas=8,16"
            )
        for part in values.split(","):
            try:
                value = yaml.safe_load(part)
            except yaml.YAMLError:
                raise BadArgument(f"{text!r}: {part!r} is not a value in YAML") from None
            found.append(WhatIf(tuple(path.split(".")), value, f"{path}={part.strip()}"))
    return tuple(found)


def changed_manifest(manifest: dict[str, Any], what_if: WhatIf) -> dict[str, Any]:
    """Return a copy of a service's manifest with the field of its spec set; null removes the field."""
    changed = dict(manifest)
    inner = changed
    for key in ("spec", *what_if.path[:-1]):
        below = inner.get(key)
        if below is not None and not isinstance(below, dict):
            raise BadArgument(f"{what_if.text!r}: {key} has no fields")
        inner[key] = dict(below or {})
        inner = inner[key]
    if what_if.value is None:
        inner.pop(what_if.path[-1], None)
    else:
        inner[what_if.path[-1]] = what_if.value
    return changed


Span = tuple[float, float]
"""From and until, seconds since the start."""


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a run."""

    crashes: tuple[float, ...] = ()
    """Times at which an engine ends."""
    metrics: tuple[Span, ...] = ()
    """Spans without metrics."""
    gpus: tuple[Span, ...] = ()
    """Spans without free GPUs."""

    def has_metrics(self, now: float) -> bool:
        """Return whether Prometheus answers."""
        return not any(start <= now < end for start, end in self.metrics)

    def has_gpus(self, now: float) -> bool:
        """Return whether new pods find accelerators."""
        return not any(start <= now < end for start, end in self.gpus)


FAULTS: Final = "crash:SECOND, metrics:FROM-UNTIL or gpus:FROM-UNTIL, in seconds since the start"


def parse_faults(texts: Iterable[str]) -> Faults:
    """Return the faults in texts such as `crash:600` and `metrics:900-1200`."""
    crashes: list[float] = []
    spans: dict[str, list[Span]] = {"metrics": [], "gpus": []}
    for text in texts:
        word, _, times = text.partition(":")
        parts = [_second(text, part) for part in times.split("-")]
        if word == "crash" and len(parts) == 1:
            crashes.append(parts[0])
        elif word in spans and len(parts) == 2 and parts[0] < parts[1]:
            spans[word].append((parts[0], parts[1]))
        else:
            raise BadArgument(f"{text!r} must be {FAULTS}")
    return Faults(tuple(sorted(crashes)), tuple(spans["metrics"]), tuple(spans["gpus"]))


def _second(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise BadArgument(f"{text!r} must be {FAULTS}") from None
    if not 0 <= value < math.inf:
        raise BadArgument(f"{text!r} must be {FAULTS}")
    return value


@dataclass(frozen=True, slots=True)
class Batch:
    """A backlog of `tokens` that arrives at `start_s` and must be finished within `window_s`."""

    tokens: float
    window_s: float
    start_s: float
    text: str
    """The argument as given."""

    @property
    def deadline_s(self) -> float:
        """The end of the window, seconds since the start of the run."""
        return self.start_s + self.window_s


BATCH: Final = "TOKENS@WINDOW[,START], for example 5M@6h or 500k@90m,2h"
MAX_BATCH_TOKENS: Final = 1e10
_TOKENS: Final = re.compile(r"(\d+(?:\.\d+)?)([kMG]?)")
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_FACTORS: Final = {
    "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0,
}  # fmt: skip


def parse_batches(texts: Iterable[str]) -> tuple[Batch, ...]:
    """Return the batches in texts such as `5M@6h,2h`: five million tokens in six hours, after two."""
    return tuple(_batch(text) for text in texts)


def _batch(text: str) -> Batch:
    tokens, _, times = text.partition("@")
    window, comma, start = times.partition(",")
    counted, lasts = _TOKENS.fullmatch(tokens.strip()), _SPAN.fullmatch(window.strip())
    begins = _SPAN.fullmatch(start.strip()) if comma else None
    if counted is None or lasts is None or (comma and begins is None):
        raise BadArgument(f"{text!r} must be {BATCH}")
    count, window_s = _scaled(counted), _scaled(lasts)
    if not 1 <= count <= MAX_BATCH_TOKENS or window_s <= 0:
        raise BadArgument(
            f"{text!r}: from 1 to {MAX_BATCH_TOKENS:.0e} tokens and a window above 0 can be simulated"
        )
    return Batch(count, window_s, _scaled(begins) if begins is not None else 0.0, text)


def _scaled(number: re.Match[str]) -> float:
    return float(number[1]) * _FACTORS[number[2]]


MAX_RATE: Final = 10_000.0
LOADS: Final = "a file with a trace, or PATTERN[:RATE[,PROMPT,OUTPUT]], for example day:40,1150,210"


def parse_load(text: str) -> tuple[Pattern, Sequence[float | None]] | None:
    """Return pattern, rate, prompt and output tokens of `day:40` or `burst:20,2050,30`; None for a file."""
    word, colon, numbers = text.partition(":")
    if word not in set(Pattern):
        return None
    values = [_positive(text, each, whole=False) for each in numbers.split(",")] if colon else []
    if len(values) not in {0, 1, 3}:
        raise BadArgument(f"{text!r} must be {LOADS}")
    if values and values[0] > MAX_RATE:
        raise BadArgument(f"{text!r}: at most {MAX_RATE:g} requests/s can be simulated")
    return Pattern(word), [*values, None, None, None][:3]


def by_service(texts: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the text of each service (NAMESPACE/NAME): its own `NAME=TEXT`, or the `TEXT` of all others.

    Empty without texts.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        meant = [full for full in names if name in {full, full.partition("/")[2]}]
        if not equals:
            meant, value = [""], text
        if len(meant) != 1:
            raise BadArgument(
                f"{text!r}: {name!r} is {'not one' if not meant else 'not only one'} of the services, {', '.join(names)}"
            )
        if meant[0] in found:
            raise BadArgument(f"{text!r}: {meant[0] or 'the rest of the services'} has one already")
        found[meant[0]] = value
    rest = [name for name in names if name not in found]
    if found and rest and "" not in found:
        raise BadArgument(f"is missing for {', '.join(rest)}; write {rest[0]}=...")
    return {name: found.get(name, found.get("", "")) for name in names if found}


def parse_tiers(text: str) -> tuple[float, float, float]:
    """Return the shares of realtime, standard and batch; their sum is 1."""
    wrong = f"{text!r} must be three shares with the sum 1: realtime,standard,batch"
    try:
        realtime, standard, batch = (float(part) for part in text.split(","))
    except ValueError:
        raise BadArgument(wrong) from None
    shares = (realtime, standard, batch)
    if not all(share >= 0 for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-3):
        raise BadArgument(wrong)
    return shares
