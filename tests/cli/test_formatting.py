"""Numbers as they are printed."""

from __future__ import annotations

from fedspan.cli.formatting import format_duration, format_number, format_percent, shorten
from fedspan.experiments.tables import format_size


def test_numbers() -> None:
    assert [format_size(n) for n in (0, 999, 1000, 1_250_000, 99_940_000, 999_600_000, 3.2e12)] == [
        "0 B", "999 B", "1.0 kB", "1.2 MB", "99.9 MB", "1.0 GB", "3.2 TB",
    ]  # fmt: skip
    assert [format_duration(s) for s in (0.4, 59.6, 75, 3675)] == ["0:00", "1:00", "1:15", "1:01:15"]
    assert [format_percent(v) for v in (None, 0.0, 0.8125, 1.0)] == ["-", "0.0%", "81.2%", "100.0%"]
    assert [format_number(v) for v in (None, 0.5, 123456.0)] == ["-", "0.5000", "1.23e+05"]
    assert shorten(" two\n words ", 20) == "two words"
    assert shorten("a long text", 6) == "a lon…"
