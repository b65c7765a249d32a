"""Settings that do not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.errors import FedspanError

RULES = ("median", "trimmed-mean", "multi-krum", "geometric-median", "flame")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy": {"mechanism": "central", "noise": 1.0}, "federation": {"weights": "uniform"}}, "two exchanges"),
        ({"privacy": {"mechanism": "local", "noise": 1.0}}, "two exchanges"),
        ({"method": {"name": "fedask", "wrappers": ["scaffold"]}}, "scaffold"),
        *(
            ({"federation": {"reduction": reduction}}, f"{reduction} would combine other clients in each")
            for reduction in ("median", "trimmed-mean", "multi-krum", "geometric-median", "flame")
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(FedspanError, match=reason):
        parse_config({"data": {"train": "x.csv"}, "method": {"name": "fedask"}, **changes})


@pytest.mark.parametrize("rule", RULES)
def test_methods_that_stack_and_secure_sums_refuse_them(rule: str) -> None:
    rules: dict[str, Any] = {"reduction": rule}
    values: dict[str, Any] = {"data": {"train": "x.csv"}, "method": {"name": "flora"}, "federation": rules}
    why = f"{rule} cannot be combined with flora, whose server needs single replies"
    with pytest.raises(FedspanError, match=why) as refused:
        parse_config(values)
    assert refused.value.field == "federation.reduction"
    summed = {**values, "method": {"name": "fedit"}}
    assert parse_config(summed).build_round_settings().reduction == rule
    with pytest.raises(FedspanError, match=f"federation.reduction {rule} compares single replies"):
        parse_config({**summed, "federation": {"reduction": rule, "secure": {}}})
