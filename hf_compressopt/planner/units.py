"""Rates and times as people write them."""

from __future__ import annotations

import re

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SCALES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}


def bandwidth(text: str) -> float:
    """Bytes per second from text: 25Gbit, 25Gbps, 100 Mbit/s, 3.1GB/s. Prefixes are powers of 1000.

    Raises:
        ValueError: For anything else, and for a rate that is not above zero and finite.
    """
    legal = "a number with a unit, such as 25Gbit, 25Gbps, 100Mbit/s (bits) or 3.1GB/s (bytes)"
    found = re.fullmatch(r"(\S*?)\s*([kKmMgGtT]?)(bit|b|B|byte)(/s|ps|)", text.strip())
    if found is None or (found[3] in ("b", "B") and not found[4]):
        raise ValueError(f"must be {legal}; got {text!r}")
    value = _number(found[1], text, legal)
    bits = found[3] in ("bit", "b")
    return value * _PREFIXES[found[2].lower()] / (8 if bits else 1)


def seconds(text: str) -> float:
    """Seconds from text: 1.2, 1.2s, 350ms, 20us.

    Raises:
        ValueError: For anything else, and for a time that is not above zero and finite.
    """
    legal = "a number of seconds, or with a unit: 1.2, 1.2s, 350ms, 20us"
    found = re.fullmatch(r"(\S*?)\s*(s|ms|us|)", text.strip())
    if found is None:
        raise ValueError(f"must be {legal}; got {text!r}")
    return _number(found[1], text, legal) * _SCALES[found[2]]


def _number(digits: str, text: str, legal: str) -> float:
    try:
        value = float(digits)
    except ValueError:
        raise ValueError(f"must be {legal}; got {text!r}") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"must be above zero and finite, {legal}; got {text!r}")
    return value
