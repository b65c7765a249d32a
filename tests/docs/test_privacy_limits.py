"""docs/privacy.md says what epsilon assumes about participation, which the accounting relies on."""

from __future__ import annotations

from pathlib import Path

from fedspan.core.noise import derive_seed_key
from fedspan.federation.privacy import compute_round_charges
from fedspan.federation.settings import RoundSettings
from fedspan.training.jobs import Privacy

ROOT = Path(__file__).parents[2]


def test_the_page_says_that_central_epsilon_needs_secret_cohorts() -> None:
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    limits = text[text.index("## What it does not protect") :]
    (item,) = [line for line in limits.splitlines() if line.startswith("- **Participation")]
    for part in ("Under `central` with `federation.clients_per_round` it does", "do not know the cohorts"):
        assert part in item
    for name in ("metrics.jsonl", "ledger.jsonl", "report.json"):
        assert f"`{name}`" in item, "where cohorts are written"
    assert "with `clients_per_round` unset" in item
    # The accounting that the page describes: the sampling rate lowers the cost, and without sampling it is 1.
    privacy = Privacy("central", 1.0, 1.0, key=derive_seed_key(1))
    rates = [
        compute_round_charges(RoundSettings(4, cohort=size, privacy=privacy), 8)[0].mechanism.rate for size in (2, None)
    ]
    assert rates == [0.25, 1.0]
