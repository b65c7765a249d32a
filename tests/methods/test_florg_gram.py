"""FLoRG with Gram sums under the tests of what every method declares of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from helpers.families import others_slow
from helpers.method_checks import (
    POLICIES,
    require_any_order,
    require_catching_up,
    require_declared_bytes,
    require_exactness,
    require_extras_policy,
    require_frozen_tensors,
    require_new_values,
    require_no_writes,
    require_short_moments,
    sends,
)
from helpers.watched_rounds import MethodRun, RunMethod

KEY = "florg"


@pytest.fixture
def gram(run_method: RunMethod) -> RunMethod:
    """``run_method`` with the option set."""

    def get(key: str, **changes: Mapping[str, Any]) -> MethodRun:
        return run_method(key, **{**changes, "method": {"gram_sums": True, **changes.get("method", {})}})

    return get


def test_it_declares_what_it_does(gram: RunMethod) -> None:
    run = gram(KEY)
    assert run.federation.method.declare_claims().reduction == "sum"
    assert sends(run) == run.federation.method.declare_claims().sends == "other"
    for round in run.rounds:
        assert not any(call.result.stack for call in round.of("contribute"))


def test_claims(gram: RunMethod) -> None:
    require_exactness(KEY, gram)
    require_any_order(KEY, gram)
    require_new_values(KEY, gram)
    require_no_writes(KEY, gram)
    require_short_moments(KEY, gram)
    require_frozen_tensors(KEY, {}, gram)


@pytest.mark.parametrize("policy", others_slow(POLICIES, ["frozen"]))
def test_messages(policy: str, gram: RunMethod) -> None:
    require_declared_bytes(KEY, policy, gram)
    require_extras_policy(KEY, policy, gram)


def test_a_client_that_was_away(gram: RunMethod) -> None:
    require_catching_up(KEY, gram)
