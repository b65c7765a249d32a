"""The federation and privacy sections: what does not fit together, and the settings of the rounds."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from fedspan.config.federation import FederationConfig, FractionRanks, RandomRanks
from fedspan.config.sections import PrivacyConfig
from fedspan.core.method import Claims
from fedspan.core.noise import derive_seed_key
from fedspan.errors import FedspanError
from fedspan.federation.validation import ReplyRules
from fedspan.training.jobs import Privacy
from helpers.refusals import refused

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
        ({"assign": "fractions", "of": {4: 0.25, 8: 0.5}}, "shares that sum to 1, not to 0.75"),
        ({"assign": "fractions", "of": {}}, "at least 1 item"),
        ({"assign": "draw", "of": []}, "at least 1 item"),
        ({"assign": "sorted", "of": [4]}, "ranks by client"),
    ],
)
def test_what_is_no_way_to_write_ranks_is_refused(written: object, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        config(ranks=written)


@pytest.mark.parametrize("values", [{"over_select": 1}, {"over_select": 1, "clients_per_round": 2, "secure": {}}])
def test_over_selection_needs_a_cohort_and_plain_replies(values: dict[str, Any]) -> None:
    with refused("federation.over_select"):
        config(**values)


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"clients_per_round": None}, None, "buffered"),
        ({}, "its jobs differ", "buffered"),
        ({"over_select": 1}, None, "over_select"),
        ({"secure": {}}, None, "secure"),
        ({"late_joiners": True}, None, "late_joiners"),
    ],
)
def test_asynchronous_rounds_refuse_some_settings(changes: dict[str, Any], reason: str | None, field: str) -> None:
    with refused(f"federation.{field}"):
        config(**{**BUFFERED, **changes}).require_buffered_fit("X", reason)


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
    "values", [BUFFERED, {"require_tags": {"site": "eu"}}, {"min_examples": 2}, {"late_joiners": True}]
)
def test_what_selects_nodes_or_needs_a_clock_is_refused_in_a_simulation(values: dict[str, Any]) -> None:
    with refused(f"federation.{list(values)[-1]}"):
        config(**values).require_simulated(has_speeds=False)


@pytest.mark.parametrize(
    ("mechanism", "wrappers", "ranks", "why"),
    [
        ("central", [], None, "central privacy counts on the same number of clients"),
        (None, ["scaffold"], None, "scaffold averages its control variates over a fixed number"),
        (None, [], [2, 4], "assigns ranks to the clients that are there at the start"),
    ],
)
def test_fixed_clients_refuse_late_ones(mechanism: str | None, wrappers: list[str], ranks: Any, why: str) -> None:
    with pytest.raises(FedspanError, match=f"{why}.*Expected false"):
        config(late_joiners=True, ranks=ranks).require_late_fit(mechanism, wrappers)


@pytest.mark.parametrize(
    ("changes", "claims", "why"),
    [
        ({}, {"reduction": "stack"}, "the server of x needs single replies"),
        ({}, {"sends": "nothing"}, "x sends nothing"),
        ({"reduction": "median"}, {}, "federation.reduction median compares single replies"),
        ({"ranks": [2, 4]}, {}, "with federation.ranks, clients of smaller ranks send zeros beyond them"),
    ],
)
def test_single_replies_refuse_secure_sums(changes: dict[str, Any], claims: dict[str, Any], why: str) -> None:
    with pytest.raises(FedspanError, match=f"X cannot be aggregated securely: {why}.*Remove federation.secure"):
        config(secure={}, **changes).require_secure_fit("x", "X", replace(CLAIMS, **claims))


def test_settings_of_the_rounds_have_every_field() -> None:
    rules = {"min_replies": 3, "deadline": 9.0, "retries": 1, "max_norm_ratio": 4.0, "max_missed_rounds": 5}
    assert config(**rules, clients_per_round=4, over_select=2).build_reply_rules() == ReplyRules(3, 9.0, 1, 4.0, 2, 5)


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
    ("claims", "refusing"),
    [
        ({}, ()),
        ({"sends": "nothing"}, ("central", "local", "dp-sgd")),
        ({"budgets": True}, ("central", "local")),
        ({"reduction": "stack"}, ("central",)),
        ({"second_exchange": True}, ("central", "local")),
        ({"sends": "other"}, ("local",)),
        ({"sends": "changes"}, ("local",)),
    ],
)
@pytest.mark.parametrize("mechanism", ["central", "local", "dp-sgd"])
def test_methods_fit_or_are_refused(claims: dict[str, Any], refusing: tuple[str, ...], mechanism: Any) -> None:
    config, federation = PrivacyConfig(mechanism=mechanism, noise=1.0), FederationConfig.model_validate(UNIFORM)
    method = replace(CLAIMS, **claims)
    if mechanism not in refusing:
        config.require_fit("X", method, federation)
        return
    with refused("privacy.mechanism"):
        config.require_fit("X", method, federation)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"weights": "examples"}, "weights"),
        ({"reduction": "median"}, "reduction"),
        ({"ranks": [2, 4]}, "ranks"),
        ({"clients_per_round": 2, "over_select": 1}, "over_select"),
        ({"clients_per_round": 2, "secure": {}}, "clients_per_round"),
    ],
)
def test_central_privacy_refuses_what_its_sum_does_not_allow(changes: dict[str, Any], field: str) -> None:
    federation = FederationConfig.model_validate({**UNIFORM, **changes})
    with refused(f"federation.{field}"):
        PrivacyConfig(mechanism="central", noise=1.0).require_fit("X", CLAIMS, federation)
    PrivacyConfig(mechanism="local", noise=1.0).require_fit("X", CLAIMS, federation)
