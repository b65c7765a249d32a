"""The privacy section: which methods and federations fit, and the settings of the engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from fedspan.config.federation import FederationConfig
from fedspan.config.privacy import PrivacyConfig
from fedspan.core.method import Claims
from fedspan.core.noise import derive_seed_key
from fedspan.errors import FedspanError
from fedspan.training.jobs import Privacy

CLAIMS = Claims("a paper", exact=True)
UNIFORM = {"weights": "uniform"}


def test_noise_or_a_budget_is_needed() -> None:
    with pytest.raises(ValidationError, match="noise, or an epsilon from which the noise follows"):
        PrivacyConfig(mechanism="central")
    assert PrivacyConfig(mechanism="central", epsilon=3.0).noise is None


def test_noise_is_keyed_by_the_seed_or_by_a_secret() -> None:
    config = PrivacyConfig(mechanism="local", clip=0.5, noise=2.0, epsilon=3.0, delta=1e-6, accountant="prv")
    expected = Privacy("local", 0.5, 2.0, 3.0, 1e-6, "prv", 7, derive_seed_key(4), secret=False)
    assert config.build_settings(7, 4) == expected
    assert config.build_settings(7, 4, bytes(32)) == replace(expected, key=bytes(32), secret=True)


@pytest.mark.parametrize(
    ("claims", "refusing", "why"),
    [
        ({}, (), ""),
        ({"sends": "nothing"}, ("central", "local", "dp-sgd"), "it transmits nothing"),
        ({"budgets": True}, ("central", "local"), "what a client chooses to send tells of its data"),
        ({"reduction": "stack"}, ("central",), "its server combines replies one by one"),
        ({"second_exchange": True}, ("central", "local"), "its rounds have two exchanges"),
        ({"sends": "other"}, ("local",), "noise would spoil what it sends"),
        ({"sends": "changes"}, ("local",), "noise would spoil what it sends"),
    ],
)
@pytest.mark.parametrize("mechanism", ["central", "local", "dp-sgd"])
def test_methods_fit_or_are_refused_with_the_reason(
    claims: dict[str, Any], refusing: tuple[str, ...], why: str, mechanism: Any
) -> None:
    config, federation = PrivacyConfig(mechanism=mechanism, noise=1.0), FederationConfig.model_validate(UNIFORM)
    method = replace(CLAIMS, **claims)
    if mechanism not in refusing:
        config.require_fit("X", method, federation)
        return
    with pytest.raises(FedspanError, match=f"X cannot be combined with {mechanism} privacy: {why}") as caught:
        config.require_fit("X", method, federation)
    assert caught.value.field == "privacy.mechanism"


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"weights": "examples"}, "weights", "Set it to uniform"),
        ({"reduction": "median"}, "reduction", "Set it to mean"),
        ({"ranks": [2, 4]}, "ranks", "Leave it out"),
        ({"clients_per_round": 2, "over_select": 1}, "over_select", "Set it to 0"),
        ({"clients_per_round": 2, "secure": {}}, "clients_per_round", "Leave it out"),
    ],
)
def test_central_privacy_refuses_what_its_sum_does_not_allow(changes: dict[str, Any], field: str, remedy: str) -> None:
    federation = FederationConfig.model_validate({**UNIFORM, **changes})
    with pytest.raises(FedspanError, match=f"cannot be combined with privacy.mechanism: central.*{remedy}") as caught:
        PrivacyConfig(mechanism="central", noise=1.0).require_fit("X", CLAIMS, federation)
    assert caught.value.field == f"federation.{field}"
    PrivacyConfig(mechanism="local", noise=1.0).require_fit("X", CLAIMS, federation)
