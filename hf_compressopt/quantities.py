"""Numbers as people write and read them: 350M, 25 Gbit/s, 350 ms, 18.6 MB."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_BITS_OR_BYTES = "[kmgtKMGT]?(bit|byte)(/s|ps)?|[kmgtKMGT]?[bB](/s|ps)|[kmgtKMGT](b[eE]?)?"

# -- written ----------------------------------------------------------------------------------------------------------


def count(text: str, least: int = 1, most: float = 1e15) -> int:
    """A whole number from text: 8, 124e6, 350M, 7B."""
    legal = f"a whole number from {least} to {most:g}, such as 8, 124e6 or 350M"
    digits, prefix = _split(text, "[kmgbtKMGBT]")
    value = _number(digits, _PREFIXES[prefix.lower()], text, legal, least, most)
    if value != int(value):
        raise ValueError(f"must be {legal}; got {text!r}")
    return int(value)


def mebibytes(text: str) -> float:
    """A size in MiB from text: 25, 0.5."""
    return _number(text, 1, text, "a number of MiB, at least one float32 value and at most 1e6", 4 / 2**20, 1e6)


def bandwidth(text: str) -> float:
    """Bytes per second from text: 10G, 25Gbit, 25Gbps, 1GbE, 100 Mbit/s, 3.1GB/s. Prefixes are powers of 1000."""
    digits, unit = _split(text, _BITS_OR_BYTES)
    prefix = unit[:1].lower() if unit[:1] in tuple("kmgtKMGT") else ""
    scale = _PREFIXES[prefix] / (1 if "B" in unit or "byte" in unit else 8)
    legal = "from 1 to 1e18 bytes/s, with a unit such as 25Gbit, 25Gbps, 25G, 100Mbit/s (bits) or 3.1GB/s (bytes)"
    return _number(digits if unit else "", scale, text, legal, 1, 1e18)


def seconds(text: str) -> float:
    """Seconds from text: 1.2, 1.2s, 350ms, 20us."""
    digits, unit = _split(text, "s|ms|us")
    legal = "a number of seconds from 1e-12 to 1e7, or with a unit: 1.2, 1.2s, 350ms, 20us"
    return _number(digits, {"ms": 1e-3, "us": 1e-6}.get(unit, 1), text, legal, 1e-12, 1e7)


def _split(text: str, unit: str) -> tuple[str, str]:
    """Return what stands before a unit at the end, and the unit, which may be missing; ``unit`` is its pattern."""
    digits = re.sub(rf"\s*({unit})$", "", text.strip())
    return digits, text.strip().removeprefix(digits).strip()


def _number(digits: str, scale: float, text: str, legal: str, least: float, most: float) -> float:
    try:
        value = float(digits) * scale
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ValueError(f"must be {legal}; got {text!r}")
    return value


def argument(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """A parser for argparse, which shows the message of an ArgumentTypeError and hides that of a ValueError."""

    def parsed(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


# -- read -------------------------------------------------------------------------------------------------------------


def with_unit(nbytes: float) -> str:
    """A number of bytes in three digits: 18.6 MB."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    place = next((i for i in range(len(units) - 1) if nbytes < 999.5 * 1000**i), len(units) - 1)
    return f"{nbytes / 1000**place:.3g} {units[place]}"


def duration(seconds: float) -> str:
    """A time in words: 350 ms, 2.4 s, 5 minutes, 3.2 hours, 12 days."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} minutes"
    hours = seconds / 3600
    return f"{hours:.2g} hours" if hours < 99.5 else f"{hours / 24:,.0f} days"
