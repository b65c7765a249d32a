"""Numbers, times and names as runs show them."""

from __future__ import annotations

__all__ = ["format_duration", "format_number", "format_runs", "get_title", "shorten"]


def format_number(value: float | None) -> str:
    """Format a loss with four decimals, or three digits if it is large or would have fewer; a dash if there is none."""
    if value is None:
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


def get_title(name: str) -> str:
    """Return the title of a baseline."""
    return {"local": "local only", "centralized": "centralized"}.get(name, name)
