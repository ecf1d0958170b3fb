"""Numbers as people write them on a command line: counts, sizes, rates and times, each within legal bounds."""

from __future__ import annotations

import re

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SCALES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_RATES = (1.0, 1e18)  # bytes per second
_TIMES = (1e-12, 1e7)  # seconds
_SMALLEST_MIB, _LARGEST_MIB = 4 / 2**20, 1e6  # one float32 value


def count(text: str, least: int = 1, most: float = 1e15) -> int:
    """A whole number from text: 8, 124e6, 7e9.

    Raises:
        ValueError: If the text is no whole number, or a number outside [least, most].
    """
    legal = f"a whole number from {least} to {most:g}"
    value = _float(text, legal)
    if not least <= value <= most or value != int(value):
        raise ValueError(f"must be {legal}, got {text!r}")
    return int(value)


def mebibytes(text: str) -> float:
    """A size in MiB from text: 25, 0.5.

    Raises:
        ValueError: If the text is no number, or a number that holds no float32 value or is not finite.
    """
    legal = f"a number of MiB, at least one float32 value and at most {_LARGEST_MIB:g}"
    value = _float(text, legal)
    if not _SMALLEST_MIB <= value <= _LARGEST_MIB:
        raise ValueError(f"must be {legal}, got {text!r}")
    return value


def bandwidth(text: str) -> float:
    """Bytes per second from text: 25Gbit, 25Gbps, 100 Mbit/s, 3.1GB/s. Prefixes are powers of 1000.

    Raises:
        ValueError: If the text is no rate, or a rate that is not above zero and finite.
    """
    legal = "a number with a unit, such as 25Gbit, 25Gbps, 100Mbit/s (bits) or 3.1GB/s (bytes)"
    found = re.fullmatch(r"(\S*?)\s*([kKmMgGtT]?)(bit|b|B|byte)(/s|ps|)", text.strip())
    if found is None or (found[3] in ("b", "B") and not found[4]):
        raise ValueError(f"must be {legal}; got {text!r}")
    scale = _PREFIXES[found[2].lower()] / (8 if found[3] in ("bit", "b") else 1)
    return _scaled(found[1], scale, text, legal, _RATES, "bytes per second")


def seconds(text: str) -> float:
    """Seconds from text: 1.2, 1.2s, 350ms, 20us.

    Raises:
        ValueError: If the text is no time, or a time that is not above zero and finite.
    """
    legal = "a number of seconds, or with a unit: 1.2, 1.2s, 350ms, 20us"
    found = re.fullmatch(r"(\S*?)\s*(s|ms|us|)", text.strip())
    if found is None:
        raise ValueError(f"must be {legal}; got {text!r}")
    return _scaled(found[1], _SCALES[found[2]], text, legal, _TIMES, "seconds")


def _scaled(digits: str, scale: float, text: str, legal: str, bounds: tuple[float, float], unit: str) -> float:
    """A positive number times the scale of its unit, within bounds."""
    value = _float(digits, legal, text)
    if not 0 < value < float("inf"):
        raise ValueError(f"must be above zero and finite, {legal}; got {text!r}")
    if not bounds[0] <= value * scale <= bounds[1]:
        raise ValueError(f"must be from {bounds[0]:g} to {bounds[1]:g} {unit}, got {text!r}")
    return value * scale


def _float(digits: str, legal: str, text: str | None = None) -> float:
    try:
        return float(digits)
    except ValueError:
        raise ValueError(f"must be {legal}; got {text or digits!r}") from None
