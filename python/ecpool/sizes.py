"""Sizes as people write them: ``"4GiB"``, ``"512 MB"``, ``1073741824``."""

import math
import re
from decimal import Decimal
from numbers import Integral

from ecpool.errors import InvalidArgumentError

ALLOWED = (
    "a positive number of bytes, or a number with one of the units "
    "B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024), such as '4GiB'"
)

_MAX_BYTES = 2**63 - 1
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = {"": 1, "b": 1} | _BINARY | _DECIMAL


def parse_size(value: object, *, what: str) -> int:
    """Turn a size into a number of bytes, at least 1 and below 2**63.

    ``value`` is an integer of bytes, a float without a fraction (JSON's ``4e9``), or text: a
    decimal number and a unit, in any case, with or without a space between. A fraction of a byte is
    cut off. ``what`` names the setting in the error message.

    Raises InvalidArgumentError, which says what is allowed, for everything else.
    """
    size = _from_text(value, what) if isinstance(value, str) else _from_number(value, what)
    if size <= 0:
        raise InvalidArgumentError(f"{what} is {value!r}; it must be {ALLOWED}")
    if size > _MAX_BYTES:
        raise InvalidArgumentError(f"{what} is {value!r}; that is more than any machine addresses")
    return size


def format_size(nbytes: int) -> str:
    """Bytes for people: ``"1.5 GiB"``, ``"512 MiB"``, ``"17 B"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _BINARY[unit.lower()]
        if nbytes >= scale:
            return f"{nbytes / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} B"


def _from_number(value: object, what: str) -> int:
    if not isinstance(value, bool) and isinstance(value, Integral):
        return int(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    raise InvalidArgumentError(f"{what} is {value!r}; it must be {ALLOWED}")


def _from_text(text: str, what: str) -> int:
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise InvalidArgumentError(f"{what} is {text!r}; it must be {ALLOWED}")
    number, unit = match.groups()
    scale = _UNITS.get(unit.lower())
    if scale is None:
        raise InvalidArgumentError(f"{what} is {text!r}; {_unit_advice(unit)}it must be {ALLOWED}")
    if scale == 1 and "." in number:
        raise InvalidArgumentError(
            f"{what} is {text!r}, a fraction of a byte; it must be {ALLOWED}"
        )
    return int(Decimal(number) * scale)


def _unit_advice(unit: str) -> str:
    prefix = unit[:1].upper()
    if unit.lower() in {"k", "m", "g", "t", "ki", "mi", "gi", "ti"}:
        return f"write {prefix}iB (powers of 1024) or {prefix}B (powers of 1000); "
    return ""
