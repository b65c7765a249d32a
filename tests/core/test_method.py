"""What a method may claim."""

from __future__ import annotations

import pytest

from fedspan.core.method import Claims
from fedspan.errors import FedspanError


def test_claims_with_a_second_exchange_must_sum() -> None:
    with pytest.raises(FedspanError, match="combines sums"):
        Claims(paper="none", exact=False, reduction="stack", second_exchange=True)
