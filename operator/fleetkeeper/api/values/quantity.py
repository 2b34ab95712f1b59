"""Kubernetes quantities: `parse_quantity` reads them, `canonical_quantity` formats them like the API server.

Follows k8s.io/apimachinery/pkg/api/resource: suffixes Ki Mi Gi Ti Pi Ei (powers of 1024),
n u m k M G T P E (powers of 1000), and exponents (1e3). Fractions of a nano are rounded up.
Exponents have at most two digits here. Kubernetes accepts more, but such values are too large to
compute with.
"""

from __future__ import annotations

import re
from decimal import ROUND_UP, Context, Decimal

_PATTERN = re.compile(
    r"(?P<sign>[+-]?)(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]{1,2}))?",
    re.ASCII,
)
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_DECIMAL_NAME = {power: name for name, power in _DECIMAL.items()}
_NANO = Decimal(1).scaleb(-9)
_LARGEST = Decimal(2**63 - 1)
_EXACT = Context(prec=400)
MAX_LENGTH = 64


class BadQuantity(ValueError):
    """A string that is not a quantity. The message contains examples of quantities."""


def _match(text: str) -> re.Match[str]:
    found = _PATTERN.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if found is None:
        raise _bad(text)
    return found


def _bad(text: str) -> BadQuantity:
    return BadQuantity(
        f"{text[:MAX_LENGTH]!r} is not a quantity; write a number with an optional unit, such as 32Gi, 500m, or 4"
    )


def _round(value: Decimal) -> Decimal:
    """Round away from zero to whole nanos and cap at 2^63-1, as Kubernetes does."""
    if value == 0:
        return Decimal(0)
    rounded = value.quantize(_NANO, rounding=ROUND_UP, context=_EXACT)
    return max(-_LARGEST, min(_LARGEST, rounded))


def parse_quantity(text: str) -> Decimal:
    """Return the value of a quantity in its base unit (cores, bytes, or a count).

    Raises:
        BadQuantity: The text is not a Kubernetes quantity.
    """
    found = _match(text)
    try:
        return _round(_value(found))
    except ArithmeticError as problem:
        raise _bad(text) from problem


def _value(found: re.Match[str]) -> Decimal:
    """Return the exact value, before rounding and capping."""
    number = Decimal(found["sign"] + found["number"])
    suffix = found["suffix"] or ""
    if suffix in _BINARY:
        return _EXACT.multiply(number, Decimal(1024 ** _BINARY[suffix]))
    exponent = int(found["exponent"]) if found["exponent"] else _DECIMAL[suffix]
    return number.scaleb(exponent, context=_EXACT)


def canonical_quantity(text: str) -> str:
    """Return the quantity as the API server writes it: `1024Mi` is `1Gi`, `0.5` is `500m`, `1000` is `1k`.

    Raises:
        BadQuantity: The text is not a Kubernetes quantity.
    """
    found = _match(text)
    value = parse_quantity(text)
    if value == 0:
        return "0"
    if (found["suffix"] or "") in _BINARY:
        whole = _canonical_binary(value)
        if whole is not None:
            return whole
    if found["exponent"] is not None:
        return _canonical_exponent(value)
    return _canonical_decimal(value)


def _canonical_binary(value: Decimal) -> str | None:
    """Format with the largest binary suffix that leaves an integer, or return None for a fraction.

    Kubernetes writes values below 1024 without a binary suffix; return None for these as well.
    """
    if value != value.to_integral_value() or -1024 < value < 1024:
        return None
    number, power = int(value), 0
    while number % 1024 == 0 and power < len(_BINARY):
        number //= 1024
        power += 1
    return f"{number}{next((name for name, of in _BINARY.items() if of == power), '')}"


def _thousands(value: Decimal) -> tuple[int, int]:
    """Return (mantissa, power of ten) with the largest power of 1000 that leaves an integer mantissa."""
    mantissa, power = int(_EXACT.multiply(value, Decimal(10**9))), -9
    while mantissa % 1000 == 0 and power < _DECIMAL["E"]:
        mantissa //= 1000
        power += 3
    return mantissa, power


def _canonical_decimal(value: Decimal) -> str:
    mantissa, power = _thousands(value)
    return f"{mantissa}{_DECIMAL_NAME[power]}"


def _canonical_exponent(value: Decimal) -> str:
    mantissa, power = _thousands(value)
    return f"{mantissa}e{power}" if power else str(mantissa)
