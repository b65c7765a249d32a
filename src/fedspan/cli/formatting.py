"""Human-readable numbers, and the console that they are printed to."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from fedspan.tasks.metrics import METRICS

__all__ = [
    "console",
    "duration",
    "flops",
    "number",
    "one_line",
    "percent",
    "plain_table",
    "score",
    "span",
    "titles",
]


def console() -> Console:
    """Return a console on standard output; colours only in a terminal."""
    return Console(highlight=False, markup=False, emoji=False)


def plain_table() -> Table:
    """Make a table of minimal width with one line under its head."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")


def number(value: float | None) -> str:
    """Format a loss with four decimals, or four digits if it is large; a dash if it is not a number."""
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """Format 0.8125 as 81.2%; a dash for an unmeasured value."""
    return "-" if value is None else f"{100 * value:.1f}%"


def score(metric: str, value: float | None) -> str:
    """Format a metric's value: shares in percent, all else as a number; a dash for an unmeasured value."""
    return percent(value) if METRICS[metric].percent else number(value)


def duration(seconds: float) -> str:
    """Format 75 as 1:15, 3675 as 1:01:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def flops(count: float) -> str:
    """Format floating-point operations: 186 195 787 776 as 186 G."""
    if count < 1000:
        return f"{count:.0f}"
    for unit in "kMGTPE":
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} Z"


def span(seconds: float) -> str:
    """Format an approximate time: 0.193 as 0.19 s, 4260 as 71 min, 90 000 as 25 h, 600 000 as 6.9 days."""
    for unit, length, most in (("s", 1.0, 100.0), ("min", 60.0, 100.0), ("h", 3600.0, 72.0)):
        if seconds < most * length:
            return f"{_rough(seconds / length)} {unit}"
    return f"{_rough(seconds / 86400)} days"


def _rough(value: float) -> str:
    """Format a value with two digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def one_line(text: str, width: int) -> str:
    """Shorten a text to one line of at most ``width`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def titles(name: str) -> str:
    """Return the title of a baseline."""
    return {"local": "local only", "centralised": "centralised"}.get(name, name)
