"""Numbers, times and texts as runs show them."""

from __future__ import annotations

import math

from fedspan.tasks.metrics import METRICS


def format_number(value: float | None) -> str:
    """Format a loss with four decimals, or three digits if it is large or would have fewer; a dash if there is none."""
    if value is None or math.isnan(value):  # no node sent its loss
        return "-"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1000 or not value else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Format 75 as 1:15, 3675 as 1:01:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_runs(count: int) -> str:
    """Format 1 as "1 run", 2 as "2 runs"."""
    return "1 run" if count == 1 else f"{count} runs"


def shorten(text: str, width: int) -> str:
    """Shorten a text to one line of at most ``width`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def format_score(metric: str, value: float | None) -> str:
    """Format a metric's value: shares in percent, all else as a number; a dash for an unmeasured value."""
    if value is not None and METRICS[metric].is_percentage:
        return f"{100 * value:.1f}%"
    return format_number(value)


def format_size(count: float) -> str:
    """Format bytes in decimal units: 3 412 345 as 3.4 MB."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.{0 if count >= 99.95 else 1}f} {unit}"
    return f"{count / 1000:.1f} TB"
