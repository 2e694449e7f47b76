"""Format quantities as text, and parse sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from evener.core.base.errors import UsageError

COUNT_PATTERN = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbt]?)", re.IGNORECASE)
DURATION_PATTERN = re.compile(
    r"(\d+(?:\.\d+)?)\s*(seconds?|secs?|s|minutes?|mins?|m|hours?|h|days?|d|)(?![a-z])\s*", re.IGNORECASE
)
DURATION_FACTORS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
COUNT_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def format_seconds(value: float | None) -> str:
    """Return a duration with three significant digits, or "not measured" for None.

    >>> (format_seconds(0.01234), format_seconds(0.000999999), format_seconds(2.5), format_seconds(4020),
    ...  format_seconds(None))
    ('12.3 ms', '1 ms', '2.50 s', '1 h 07 min', 'not measured')
    """
    if value is None:
        return "not measured"
    if value < 0:
        return "-" + format_seconds(-value)
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 60:
        return f"{value:.2f} s"
    minutes, whole = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {whole:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_count(value: float | None) -> str:
    """Return a count with the prefix k, M, B or T: 1e9 parameters are 1.0B.

    >>> (format_count(125_829_120), format_count(1.6e9), format_count(4096), format_count(57.04), format_count(999.6),
    ...  format_count(None))
    ('125.8M', '1.6B', '4.1k', '57', '1.0k', 'not measured')
    """
    return "not measured" if value is None else _prefixed(value, "kMBT")


def format_si(value: float) -> str:
    """Return a quantity with its SI prefix, to be followed by the unit.

    >>> format_si(1e9) + "bit", format_si(2.5e12) + "FLOP/s"
    ('1.0Gbit', '2.5TFLOP/s')
    """
    return _prefixed(value, "kMGT")


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes with its unit; GB is 1e9.

    >>> format_bytes(503_316_480), format_bytes(12)
    ('503.3 MB', '12 B')
    """
    return (
        f"{num_bytes:.0f} B" if num_bytes < 1000 else format_si(num_bytes)[:-1] + " " + format_si(num_bytes)[-1] + "B"
    )


def parse_bytes(text: str, what: str = "memory") -> int:
    """Parse a size with its unit into bytes. Raise UsageError, which says of `what`, if the text is not a size.

    >>> parse_bytes("24GB"), parse_bytes("1.5 GiB"), parse_bytes("900mb")
    (24000000000, 1610612736, 900000000)
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?)b", text.strip(), re.IGNORECASE)
    power = "kmgt".index(matched[2].lower()) + 1 if matched else 0
    num_bytes = float(matched[1]) * (1024 if matched[3] else 1000) ** power if matched else 0.0
    if not 1 <= num_bytes < 1e18:
        raise UsageError(f"{what} {text}: expected a size with its unit", hint="for example 24GB")
    return round(num_bytes)


def parse_count(text: str) -> float | None:
    """Return a count that may have a suffix k, M, B or T; None if the text is not a count.

    >>> [parse_count(text) for text in ("2.5B", "300k", "1e9", "12", "5 steps")]
    [2500000000.0, 300000.0, 1000000000.0, 12.0, None]
    """
    matched = COUNT_PATTERN.fullmatch(text.strip())
    return float(matched[1]) * COUNT_FACTORS[matched[2].lower()] if matched else None


def parse_duration(text: str) -> float | None:
    """Parse a duration, "90s", "30min", "8h", "1h30m", "2d", in seconds; None if it is no duration above 0.

    >>> parse_duration("90"), parse_duration("1h30m"), parse_duration("2 days"), parse_duration("8x")
    (90.0, 5400.0, 172800.0, None)
    """
    parts = DURATION_PATTERN.findall(text)
    if not parts or DURATION_PATTERN.sub("", text).strip():
        return None
    seconds = sum(float(number) * DURATION_FACTORS[unit[:1].lower()] for number, unit in parts)
    return seconds if 0 < seconds < math.inf else None


def _prefixed(value: float, prefixes: str) -> str:
    for factor, prefix in zip((1e12, 1e9, 1e6, 1e3), reversed(prefixes), strict=True):
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:.1f}{prefix}"
    return f"{value:.3g}"


def join_names(names: Sequence[str], max_names: int = 5) -> str:
    """Join names for a sentence; of more than `max_names`, name the first ones and count the rest.

    >>> join_names("abc"), join_names("a"), join_names("abcdefgh")
    ('a, b and c', 'a', 'a, b, c, d and 4 more')
    """
    if len(names) > max_names:
        return f"{', '.join(names[: max_names - 1])} and {len(names) - max_names + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    >>> pluralize(1, "process"), pluralize(2, "process"), pluralize(2, "core")
    ('1 process', '2 processes', '2 cores')
    """
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def format_bit_rate(value_Bps: float | None) -> str:
    """Convert bytes per second to bits per second and format them with a prefix and unit; None is "not measured".

    >>> format_bit_rate(125e6), format_bit_rate(11.97e6), format_bit_rate(None)
    ('1 Gbit/s', '95.8 Mbit/s', 'not measured')
    """
    if value_Bps is None:
        return "not measured"
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value_Bps * 8 >= 0.9995 * factor:
            return f"{float(f'{value_Bps * 8 / factor:.3g}'):g} {prefix}bit/s"
    return f"{value_Bps * 8:.0f} bit/s"


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return a percentile by linear interpolation between the closest ranks, as numpy does by default.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([5.0], 0.95)
    (2.5, 5.0)
    """
    ordered = sorted(values)
    position = (len(ordered) - 1) * fraction
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float | None:
    """Return the median, or None if there are no values.

    >>> median([3.0, 1.0, 2.0]), median([])
    (2.0, None)
    """
    return sample_median(values) if values else None


def sample_median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    return percentile(values, 0.5)
