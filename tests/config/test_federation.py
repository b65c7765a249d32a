"""The federation section: ways to write ranks, what does not fit together, and the settings of the rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from fedspan.config.federation import FederationConfig, FractionRanks, RandomRanks
from fedspan.core.method import Claims
from fedspan.errors import FedspanError
from fedspan.federation.settings import BufferedSettings, SecureSettings
from fedspan.federation.validation import ReplyRules

CLAIMS = Claims("a paper", exact=True)
BUFFERED = {"clients_per_round": 2, "buffered": {"concurrency": 3}}


def config(**values: Any) -> FederationConfig:
    return FederationConfig.model_validate(values)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"east": 4, "west": 8}, {"east": 4, "west": 8}),
        ([4, 8], [4, 8]),
        ({"assign": "fractions", "of": {4: 0.25, 8: 0.75}}, FractionRanks(of={4: 0.25, 8: 0.75})),
        ({"assign": "draw", "of": [4, 8], "seed": 1}, RandomRanks(of=[4, 8], seed=1)),
        (RandomRanks(of=[4]), RandomRanks(of=[4])),
    ],
)
def test_ranks_are_written_in_four_ways(written: object, read: object) -> None:
    found = config(ranks=written)
    assert found.ranks == read
    assert FederationConfig.model_validate(found.model_dump()) == found


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (4, r"ranks by client \{client-00: 4\}, in turn \[4, 8\]"),
        ({"east": 0}, "greater than or equal to 1"),
        ([], None),
        ({"assign": "fractions", "of": {4: 0.25, 8: 0.5}}, "shares that sum to 1, not to 0.75"),
        ({"assign": "fractions", "of": {}}, "at least 1 item"),
        ({"assign": "draw", "of": []}, "at least 1 item"),
        ({"assign": "sorted", "of": [4]}, "ranks by client"),
    ],
)
def test_what_is_no_way_to_write_ranks_is_refused(written: object, why: str | None) -> None:
    if why is None:
        assert config(ranks=written).ranks == []  # the clients, whose number is unknown here, find none
        return
    with pytest.raises(ValidationError, match=why):
        config(ranks=written)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"over_select": 1}, "it needs federation.clients_per_round"),
        ({"over_select": 1, "clients_per_round": 2, "secure": {}}, "it cannot be combined with federation.secure"),
    ],
)
def test_over_selection_needs_a_cohort_and_plain_replies(values: dict[str, Any], why: str) -> None:
    with pytest.raises(FedspanError, match=why) as caught:
        config(**values)
    assert caught.value.field == "federation.over_select"


@pytest.mark.parametrize(
    ("changes", "reason", "field", "why"),
    [
        ({"clients_per_round": None}, None, "buffered", "it needs federation.clients_per_round"),
        ({}, "its jobs differ", "buffered", "X has no asynchronous rounds: its jobs differ. Remove"),
        ({"over_select": 1}, None, "over_select", "asynchronous rounds wait for no client.*Expected 0"),
        ({"secure": {}}, None, "secure", "all clients train from one state.*Expected null"),
        ({"late_joiners": True}, None, "late_joiners", "those that joined at the start.*Expected false"),
    ],
)
def test_asynchronous_rounds_refuse_what_they_do_not_allow(
    changes: dict[str, Any], reason: str | None, field: str, why: str
) -> None:
    with pytest.raises(FedspanError, match=why) as caught:
        config(**{**BUFFERED, **changes}).require_buffered_fit("X", reason)
    assert caught.value.field == f"federation.{field}"


def test_what_fits_is_accepted() -> None:
    config(**BUFFERED).require_buffered_fit("X", None)
    config(late_joiners=True).require_buffered_fit("X", "its jobs differ")
    config(**BUFFERED).require_simulated(has_speeds=True)
    config(clients_per_round=2, buffered={"concurrency": 3, "replay": "run"}).require_simulated(has_speeds=False)
    config(late_joiners=True, ranks={"assign": "draw", "of": [2]}).require_late_fit("local", ["low-precision"])
    config(ranks=[2]).require_late_fit("central", ["scaffold"])
    config(secure={}).require_secure_fit("x", "X", CLAIMS)
    config(reduction="median").require_secure_fit("x", "X", replace(CLAIMS, sends="nothing"))


@pytest.mark.parametrize(
    ("values", "field", "why"),
    [
        (BUFFERED, "buffered", "its rounds depend on how fast the clients are"),
        ({"require_tags": {"site": "eu"}}, "require_tags", "it selects nodes of a deployment"),
        ({"min_examples": 2}, "min_examples", "it selects nodes of a deployment"),
        ({"late_joiners": True}, "late_joiners", "in a simulation, set simulation.present"),
    ],
)
def test_what_selects_nodes_or_needs_a_clock_is_refused_in_a_simulation(
    values: dict[str, Any], field: str, why: str
) -> None:
    with pytest.raises(FedspanError, match=why) as caught:
        config(**values).require_simulated(has_speeds=False)
    assert caught.value.field == f"federation.{field}"


@pytest.mark.parametrize(
    ("mechanism", "wrappers", "ranks", "why"),
    [
        ("central", [], None, "central privacy counts on the same number of clients"),
        (None, ["scaffold"], None, "scaffold averages its control variates over a fixed number"),
        (None, [], [2, 4], "assigns ranks to the clients that are there at the start"),
    ],
)
def test_what_counts_on_fixed_clients_refuses_late_ones(
    mechanism: str | None, wrappers: list[str], ranks: Any, why: str
) -> None:
    with pytest.raises(FedspanError, match=f"{why}.*Expected false"):
        config(late_joiners=True, ranks=ranks).require_late_fit(mechanism, wrappers)


@pytest.mark.parametrize(
    ("changes", "claims", "why"),
    [
        ({}, {"reduction": "stack"}, "the server of x needs single replies"),
        ({}, {"sends": "nothing"}, "x sends nothing"),
        ({"reduction": "median"}, {}, "federation.reduction median compares single replies"),
    ],
)
def test_what_needs_single_replies_refuses_secure_sums(
    changes: dict[str, Any], claims: dict[str, Any], why: str
) -> None:
    with pytest.raises(FedspanError, match=f"X cannot be aggregated securely: {why}.*Remove federation.secure"):
        config(secure={}, **changes).require_secure_fit("x", "X", replace(CLAIMS, **claims))


def test_settings_of_the_rounds_have_every_field() -> None:
    assert config().build_buffered_settings() is None
    assert config().build_secure_settings() is None
    buffered = {"concurrency": 5, "staleness_exponent": 0.25, "max_staleness": 3}
    found = config(clients_per_round=2, buffered=buffered).build_buffered_settings()
    assert found == BufferedSettings(5, 0.25, 3)
    secure = {"clip": 7.0, "bits": 64, "threshold": 0.75, "neighbors": 4}
    assert config(secure=secure).build_secure_settings() == SecureSettings(7.0, 64, 0.75, 4)
    rules = {"min_replies": 3, "deadline": 9.0, "retries": 1, "max_norm_ratio": 4.0, "max_missed_rounds": 5}
    assert config(**rules, clients_per_round=4, over_select=2).build_reply_rules() == ReplyRules(3, 9.0, 1, 4.0, 2, 5)
