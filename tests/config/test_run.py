"""What follows from several sections of a run's config; the federation and privacy sections and their settings."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from fedspan.config import parse_config
from fedspan.config.combinations import require_privacy_fit
from fedspan.config.rates import FACTORS, get_training_defaults
from fedspan.config.run import RunConfig
from fedspan.core.method import Claims
from fedspan.data import DataConfig
from fedspan.data.catalogue import DatasetEntry, list_datasets
from fedspan.errors import FedspanError
from fedspan.federation.config import BufferedSettings, FederationConfig, FractionRanks, RandomRanks
from fedspan.methods.registry import METHODS
from fedspan.tasks.registry import TASKS
from fedspan.training.config import PrivacyConfig
from helpers.refusals import refused


def config(**changes: Any) -> RunConfig:
    return parse_config({"data": {"train": "train.csv"}, **changes})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "lda"),
        ({"model": {"head_init": "class-means"}}, "class-means"),
        ({"model": {"head_init": "random"}}, None),
        ({"model": {"pretrained": False}}, None),
        ({"task": "causal-lm"}, None),
        ({"task": "regression"}, "least-squares"),
    ],
)
def test_the_head_starts_by_task_and_model(changes: dict[str, Any], kind: str | None) -> None:
    found, reason = config(**changes).head_kind
    assert found == kind
    assert reason is None


def test_auto_names_the_reason_if_it_does_without_statistics() -> None:
    found, reason = config(federation={"reduction": "median"}).head_kind
    assert (found, reason) == (None, "federation.reduction: median does not apply to statistics")
    secure = {"secure": {}, "clients_per_round": 10}
    assert config(federation=secure, partition={"clients": 128}).head_kind == ("lda", None)
    found, reason = config(federation=secure, partition={"clients": 129}).head_kind
    assert (found, reason) == (None, "all clients send statistics, and a secure sum has at most 128")
    asked = config(model={"head_init": "class-means"}).head_kind
    assert asked == ("class-means", None)


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({}, 1),
        ({"cluster": {"workers": 8}, "partition": {"clients": 5}}, 5),
        ({"cluster": {"workers": 8}, "partition": {"clients": 50}}, 8),
        ({"cluster": {"workers": 8}, "federation": {"clients_per_round": 3}}, 3),
        ({"cluster": {"workers": 8}, "partition": {"partitioner": "natural", "column": "site"}}, 8),
    ],
)
def test_a_round_occupies_no_more_workers_than_it_has_clients(changes: dict[str, Any], workers: int) -> None:
    assert config(engine={"name": "loop"}, **changes).active_workers == workers


def test_a_simulation_has_rules_if_its_config_asks_for_any() -> None:
    def rules(**changes: Any) -> tuple[object, ...]:
        made = config(**changes).build_simulation_settings()
        return made.validates, made.retries, made.max_norm_ratio, made.max_missed_rounds, made.min_replies

    assert rules() == (False, 0, None, None, None)
    assert rules(federation={"secure": {}, "weights": "uniform"}) == (True, 2, 10.0, 2, None)
    assert rules(simulation={}) == (True, 2, 10.0, 2, None)
    assert rules(simulation={"validation": False}) == (False, 2, 10.0, 2, None)
    assert rules(federation={"min_replies": 2}) == (True, 2, 10.0, 2, 2)


def test_the_partition_has_the_run_s_seed_or_its_own() -> None:
    assert config(seed=5).data_seed == 5
    assert config(seed=5, partition={"seed": 0}).data_seed == 0


def test_asynchronous_rounds_of_a_simulation_need_speeds() -> None:
    rounds = {"clients_per_round": 2, "buffered": {"concurrency": 3}}
    timed = config(federation=rounds, simulation={"speed": {}})
    timed.require_simulated()
    assert timed.build_round_settings().buffered == BufferedSettings(concurrency=3)
    with refused("federation.buffered"):
        config(federation=rounds).require_simulated()


def test_every_factor_belongs_to_a_method_of_the_registry() -> None:
    assert set(FACTORS) <= set(METHODS)
    assert set(FACTORS).isdisjoint({"fedit"})  # the method that the tasks' rates are those of


@pytest.mark.parametrize("task", [task for task in TASKS if task != "trainer"])
@pytest.mark.parametrize("method", METHODS)
def test_every_task_and_method_has_defaults_that_a_config_accepts(task: str, method: str) -> None:
    found = get_training_defaults(task, method)
    assert found.lr == pytest.approx(get_training_defaults(task, "fedit").lr * FACTORS.get(method, 1.0))
    assert bool(found.logit_adjustment) == ("logit_adjustment" in TASKS[task].loss_options)
    training = {
        "lr": found.lr,
        "batch_size": found.batch_size,
        "local_epochs": found.local_epochs,
        "logit_adjustment": found.logit_adjustment,
    }
    federation = {"rounds": found.rounds}
    config = parse_config({"task": task, "data": {"train": "x.csv"}, "training": training, "federation": federation})
    assert config.build_training_settings().lr == found.lr


def test_whole_weights_take_smaller_rates_and_single_factors_larger_ones() -> None:
    rates = {method: get_training_defaults("sequence-classification", method).lr for method in METHODS}
    assert rates["fedavg"] < rates["fedit"] < rates["ffa-lora"]
    assert get_training_defaults("causal-lm", "fedit").lr < rates["fedit"]


def test_logits_are_adjusted_for_classifiers_only() -> None:
    values = {"task": "regression", "data": {"train": "x.csv"}, "training": {"logit_adjustment": 1.0}}
    with refused("training.logit_adjustment"):
        parse_config(values)
    private = {"privacy": {"mechanism": "dp-sgd", "epsilon": 3.0}, "data": {"train": "x.csv"}}
    with refused("training.logit_adjustment"):
        parse_config({**private, "training": {"logit_adjustment": 1.0}})


ENTRIES = {entry.key: entry for entry in list_datasets()}
TEXTS = {key: entry for key, entry in ENTRIES.items() if entry.task != "image-classification"}
EVERY_TEXT = pytest.mark.parametrize("entry", TEXTS.values(), ids=list(TEXTS))


@EVERY_TEXT
def test_a_run_takes_task_metric_and_answers_from_the_data_set(entry: DatasetEntry) -> None:
    config = parse_config({"data": {"dataset": entry.key}})
    assert config.task == entry.task
    assert config.evaluation.metric == (None if entry.metric == "exact_match" else entry.metric)
    assert config.evaluation.answer_pattern == entry.answer_pattern
    assert config.evaluation.max_new_tokens == (entry.max_new_tokens or 64)
    assert config.data.prompt == entry.prompt
    text = yaml.safe_dump(config.model_dump(mode="json"))
    again = parse_config(yaml.safe_load(text))
    assert again == config
    assert again.data.model_fields_set == config.data.model_fields_set


def test_a_run_s_own_words_win_over_the_data_set_s() -> None:
    evaluation = {"metric": "accuracy", "max_new_tokens": 7}
    config = parse_config({"data": {"dataset": "cola"}, "evaluation": evaluation})
    assert (config.evaluation.metric, config.evaluation.max_new_tokens) == ("accuracy", 7)
    config = parse_config({"data": DataConfig(dataset="gsm8k", prompt="{question}"), "evaluation": {"metric": "loss"}})
    assert (config.task, config.data.prompt, config.evaluation.metric) == ("causal-lm", "{question}", "loss")
    assert parse_config({"data": DataConfig(dataset="gsm8k")}).data.prompt == "question"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"task": "poetry", "data": {"dataset": "sst2"}}, "task"),
        ({"task": ["regression"], "data": {"dataset": "banking77"}}, "task"),
        ({"data": {"dataset": 3}}, "data.dataset"),
        ({"data": {"max_examples": 3}}, "data.train"),
        ({"data": {"dataset": "sst2"}, "evaluation": 3}, "evaluation"),
        ({"data": {"dataset": "sst2"}, "evaluation": {"metric": "pearson"}}, "evaluation.metric"),
    ],
)
def test_mistakes_of_a_run_are_named(values: dict[str, Any], field: str) -> None:
    with refused(field):
        parse_config(values)


CLAIMS = Claims("a paper", exact=True)
BUFFERED = {"clients_per_round": 2, "buffered": {"concurrency": 3}}


def section(**values: Any) -> FederationConfig:
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
    found = section(ranks=written)
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
        section(ranks=written)


@pytest.mark.parametrize("values", [{"over_select": 1}, {"over_select": 1, "clients_per_round": 2, "secure": {}}])
def test_over_selection_needs_a_cohort_and_plain_replies(values: dict[str, Any]) -> None:
    with refused("federation.over_select"):
        section(**values)


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
        section(**{**BUFFERED, **changes}).require_buffered_fit("X", reason)


def test_what_fits_is_accepted() -> None:
    section(**BUFFERED).require_buffered_fit("X", None)
    section(late_joiners=True).require_buffered_fit("X", "its jobs differ")
    section(**BUFFERED).require_simulated(has_speeds=True)
    section(clients_per_round=2, buffered={"concurrency": 3, "replay": "run"}).require_simulated(has_speeds=False)
    section(late_joiners=True, ranks={"assign": "draw", "of": [2]}).require_late_fit("local", ["low-precision"])
    section(ranks=[2]).require_late_fit("central", ["scaffold"])
    section(secure={}).require_secure_fit("x", "X", CLAIMS)
    section(reduction="median").require_secure_fit("x", "X", replace(CLAIMS, sends="nothing"))


@pytest.mark.parametrize(
    "values", [BUFFERED, {"require_tags": {"site": "eu"}}, {"min_examples": 2}, {"late_joiners": True}]
)
def test_what_selects_nodes_or_needs_a_clock_is_refused_in_a_simulation(values: dict[str, Any]) -> None:
    with refused(f"federation.{list(values)[-1]}"):
        section(**values).require_simulated(has_speeds=False)


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
        section(secure={}, **changes).require_secure_fit("x", "X", replace(CLAIMS, **claims))


UNIFORM = {"weights": "uniform"}


def test_noise_or_a_budget_is_needed() -> None:
    with pytest.raises(ValidationError, match="noise, or an epsilon from which the noise follows"):
        PrivacyConfig(mechanism="central")
    assert PrivacyConfig(mechanism="central", epsilon=3.0).noise is None


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
        require_privacy_fit("X", config, federation, method)
        return
    with refused("privacy.mechanism"):
        require_privacy_fit("X", config, federation, method)


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
        require_privacy_fit("X", PrivacyConfig(mechanism="central", noise=1.0), federation, CLAIMS)
    require_privacy_fit("X", PrivacyConfig(mechanism="local", noise=1.0), federation, CLAIMS)
