"""Numbers as people read them, and the console that they are printed to."""

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
    """Standard output; colours only in a terminal."""
    return Console(highlight=False, markup=False, emoji=False)


def plain_table() -> Table:
    """A table with one line under its head, as narrow as it can be."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")


def number(value: float | None) -> str:
    """A loss with four decimals, or four digits if it is large; a dash if it is not a number."""
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """0.8125 as 81.2%; a dash for what was not measured."""
    return "-" if value is None else f"{100 * value:.1f}%"


def score(metric: str, value: float | None) -> str:
    """A metric's value: shares in percent, all else as a number; a dash for what was not measured."""
    return percent(value) if METRICS[metric].percent else number(value)


def duration(seconds: float) -> str:
    """75 as 1:15, 3675 as 1:01:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def flops(count: float) -> str:
    """Floating-point operations: 186 195 787 776 as 186 G."""
    if count < 1000:
        return f"{count:.0f}"
    for unit in "kMGTPE":
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} Z"


def span(seconds: float) -> str:
    """A time that is known roughly: 0.193 as 0.19 s, 4260 as 71 min, 90 000 as 25 h, 600 000 as 6.9 days."""
    for unit, length, most in (("s", 1.0, 100.0), ("min", 60.0, 100.0), ("h", 3600.0, 72.0)):
        if seconds < most * length:
            return f"{_rough(seconds / length)} {unit}"
    return f"{_rough(seconds / 86400)} days"


def _rough(value: float) -> str:
    """Two digits, or all before the point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def one_line(text: str, width: int) -> str:
    """A text on one line of at most so many characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def titles(name: str) -> str:
    """What a baseline is called."""
    return {"local": "local only", "centralised": "centralised"}.get(name, name)
