"""The page's tables."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evidence.claims.report import format_table
from evidence.pages.engines.contenders import Measured


@dataclass(frozen=True)
class Limit:
    """A requirement and its verdict.

    Args:
        what: Description of what is judged.
        measured: Description of the measured value.
        required: Description of the required value.
        kept: Whether the requirement is met; None: not judged.
    """

    what: str
    measured: str
    required: str
    kept: bool | None

    @property
    def verdict(self) -> str:
        return "not judged" if self.kept is None else "pass" if self.kept else "**FAIL**"


def compute_ratios(slow: Measured, fast: Measured, key: str = "seconds") -> list[float]:
    """How many times faster, by repetition, by the clock or the processor's seconds."""
    pairs = zip(slow.milliseconds(key), fast.milliseconds(key), strict=True)
    return [one / other for one, other in pairs]


def format_speed_table(results: dict[str, Measured], subject: str) -> str:
    """Every contender beside the subject, whose ratios to the others are given."""
    rows: list[list[str]] = []
    for name, result in results.items():
        training = result.milliseconds("training")
        faster = compute_ratios(result, results[subject])
        spread = f"{statistics.median(faster):.2f} ({min(faster):.2f} to {max(faster):.2f})"
        first = result.ready.get("first")
        losses = [*result.ready["losses"], None][:2]
        rows.append(
            [
                name,
                f"{statistics.median(result.milliseconds()):.2f}",
                f"{statistics.median(training):.2f}" if training else "all",
                "" if name == subject else spread,
                "" if first is None else f"{first:.5f}",
                *("" if loss is None else f"{loss:.5f}" for loss in losses),
            ]
        )
    head = [
        "",
        "ms an example",
        "of it training",
        f"{subject} is faster by (smallest to largest)",
        "loss: first client",
        "round 1",
        "round 2",
    ]
    return format_table(head, rows)


def format_equal_table(medians: Mapping[str, float], subjects: Mapping[str, str]) -> str:
    """Every contender beside the subject of its own number format, as ratios of medians that the page shows.

    Args:
        medians: Milliseconds an example by contender, rounded as on the page, so that a reader can check the ratios.
        subjects: Names of the subjects by the number format that the other contenders' names contain.
    """
    rows = [
        [dtype, name, f"{median:.2f}", f"{medians[subject]:.2f}", f"{median / medians[subject]:.1f}"]
        for dtype, subject in subjects.items()
        for name, median in medians.items()
        if dtype in name.split(", ") and name != subject
    ]
    return format_table(
        ["number format", "compared with", "its ms an example", "fedspan batched", "times faster"], rows
    )


def limit_table(limits: Sequence[Limit]) -> str:
    """The requirements, with the verdicts."""
    return format_table(
        ["", "measured", "limit", ""], [[one.what, one.measured, one.required, one.verdict] for one in limits]
    )
