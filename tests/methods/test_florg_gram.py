"""FLoRG with Gram sums under the tests of what every method declares of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import test_method_claims as claims
import test_method_messages as messages

from helpers.families import others_slow
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
    assert claims.sends(run) == run.federation.method.declare_claims().sends == "other"
    for round in run.rounds:
        assert not any(call.result.stack for call in round.of("contribute"))


def test_claims(gram: RunMethod) -> None:
    claims.test_aggregation_is_exact_where_claimed_and_measurably_not_elsewhere(KEY, gram)
    claims.test_the_order_of_replies_does_not_matter(KEY, gram)
    claims.test_tensors_with_the_names_of_a_job_are_new_values_from_a_common_start(KEY, gram)
    claims.test_nobody_writes_to_what_it_is_given(KEY, gram)
    claims.test_moments_do_not_outlive_the_factors_that_they_belong_to(KEY, gram)
    claims.test_frozen_tensors_never_move(KEY, {}, gram)


@pytest.mark.parametrize("policy", others_slow(messages.POLICIES, ["frozen"]))
def test_messages(policy: str, gram: RunMethod) -> None:
    messages.test_bytes_counted_are_bytes_sent_and_bytes_declared(KEY, policy, gram)
    messages.test_extras_follow_their_policy(KEY, policy, gram)


def test_a_client_that_was_away(gram: RunMethod) -> None:
    messages.test_a_client_that_was_away_catches_up_exactly(KEY, gram)
