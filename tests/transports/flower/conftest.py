"""The processes of a deployment are started as the benchmarks start them; Flower's messages can be made."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))


@pytest.fixture
def identity() -> None:
    """Flower makes messages only where it knows of which task they are."""
    from fedspan.transports.flower.adapter import set_identity

    set_identity(1, 1, 1)
