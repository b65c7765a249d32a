"""Human-readable numbers, and the console that they are printed to."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table


def create_console() -> Console:
    """Create a console on standard output; it has colors in a terminal, or where FORCE_COLOR is set.

    Only in a terminal is it interactive: notebooks and CI set FORCE_COLOR, and show every frame of a bar.
    """
    interactive = None if sys.stdout.isatty() else False
    return Console(highlight=False, markup=False, emoji=False, force_interactive=interactive)


def create_table() -> Table:
    """Create a table of minimal width with a rule below its header."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")


def format_flop_count(count: float) -> str:
    """Format floating-point operations: 186 195 787 776 as 186 G."""
    if count < 1000:
        return f"{count:.0f}"
    for unit in "kMGTPE":
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} Z"


def format_span(seconds: float) -> str:
    """Format an approximate time: 0.193 as 0.19 s, 4260 as 71 min, 90 000 as 25 h, 600 000 as 6.9 days."""
    for unit, length, limit in (("s", 1.0, 100.0), ("min", 60.0, 100.0), ("h", 3600.0, 72.0)):
        if seconds < limit * length:
            return f"{_round_to_two_digits(seconds / length)} {unit}"
    return f"{_round_to_two_digits(seconds / 86400)} days"


def _round_to_two_digits(value: float) -> str:
    """Format a value with two digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
