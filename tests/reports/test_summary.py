"""The verdict, and scores in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")

from fedspan.reports.groups import RunGroup, group_runs
from fedspan.reports.run_data import RunData, read_runs
from fedspan.reports.summary import format_score_with_unit, write_sentences
from helpers.compared_runs import compare_run


def with_scores(runs: tuple[RunData, ...], scores: dict[str, list[float]]) -> tuple[RunData, ...]:
    made: list[RunData] = []
    for run in runs:
        assert run.report is not None
        value = scores[run.config.method.name][run.config.seed]
        report = replace(run.report, scores={"test": {"accuracy": value}}, best_round=2)
        made.append(replace(run, report=report))
    return tuple(made)


def test_the_verdict_is_computed(series: Path) -> None:
    runs = read_runs([series])
    sure = " ".join(write_sentences(group_runs(with_scores(runs, {"fedit": [0.80, 0.82], "ffa-lora": [0.70, 0.72]}))))
    assert "fedit has the best accuracy, 81.0 ± 1.4 % (mean of 2 seeds), at the best of 3 rounds by validation." in sure
    assert "ffa-lora is 10.0 points behind, which is more than two standard errors" in sure
    assert "ffa-lora sends the least" in sure
    close = " ".join(write_sentences(group_runs(with_scores(runs, {"fedit": [0.80, 0.70], "ffa-lora": [0.70, 0.79]}))))
    assert "within two standard errors" in close
    alone = " ".join(write_sentences(group_runs(with_scores(runs[:1], {"fedit": [0.8], "ffa-lora": [0.7]}))))
    assert "The accuracy of fedit is 80.0 % (one seed), at the best of 3 rounds by validation." in alone
    assert "Before the first round" not in alone
    (last,) = with_scores(runs[:1], {"fedit": [0.8]})
    assert last.report is not None
    last = replace(last, report=replace(last.report, selected=False))
    assert "The accuracy of fedit is 80.0 % (one seed), after 3 rounds." in " ".join(
        write_sentences(group_runs([last]))
    )
    failing = with_scores(runs[:1], {"fedit": [0.8]})
    assert failing[0].report is not None
    failures = {"north": {"count": 3}, "west": {"count": 1}}
    failing = (replace(failing[0], report=replace(failing[0].report, failures=failures)),)
    assert "4 replies did not count, 3 of them north's." in " ".join(write_sentences(group_runs(failing)))


def test_the_verdict_names_the_start_and_the_baselines(series: Path) -> None:
    first, second, other, _ = read_runs([series])
    above = compare_run(first, 0.975, start=0.971, local=0.606, centralized=0.972)
    (group,) = group_runs([above])
    assert group.references == {"start": 0.971, "local": 0.606, "centralized": 0.972}
    assert write_sentences([group])[:3] == (
        "The accuracy of fedit is 97.5 % (one seed), at the best of 3 rounds by validation.",
        "Before the first round it was 97.1 %; the rounds raised it by 0.4 points.",
        "Local-only training (mean client) reached 60.6 %. Centralized training reached 97.2 %.",
    )
    assert not any("more rounds" in sentence for sentence in write_sentences([group]))
    below = compare_run(second, 0.955, start=0.971, local=0.606, centralized=0.992)
    groups = group_runs([above, below, other])
    means = " ".join(write_sentences(groups[:1]))
    assert "Before the first round it was 97.1 %; the rounds lowered it by 0.6 points." in means
    assert "Centralized training reached 98.2 %." in means
    assert "The best round was the last one, so more rounds may improve the result." in means


def test_the_verdict_names_the_clients_own_tests_beside_held_out_examples(series: Path) -> None:
    compared = compare_run(read_runs([series])[0], 0.975, start=0.971, local=0.606, centralized=0.972)
    assert compared.report is not None
    assert not any("own tests" in sentence for sentence in write_sentences([RunGroup("fedit", (compared,))]))
    scores = {name: {**compared.references[name], "clients": {"accuracy": 0.911}} for name in ("local", "centralized")}
    report = replace(
        compared.report,
        scores={**compared.report.scores, "clients": {"accuracy": 0.971}},
        baselines={name: {"scores": score, "by_client": {}} for name, score in scores.items()},
    )
    start = {**compared.rows[0], "clients": {"accuracy": 0.979}}
    group = RunGroup("fedit", (replace(compared, report=report, rows=(start, *compared.rows[1:])),))
    assert group.client_means == {"result": 0.971, "start": 0.979, "local": 0.911, "centralized": 0.911}
    assert (
        "On their own tests, the clients' mean is 97.1 % (97.9 % before the first round, "
        "91.1 % with local-only training, 91.1 % with centralized training)."
    ) in write_sentences([group])


def test_the_worst_client_is_that_of_the_metric(series: Path) -> None:
    (run,) = read_runs([series / "fedit-seed0"])
    assert run.report is not None

    def said(metric: str, values: list[float]) -> str:
        own = {f"c{number}": {metric: value} for number, value in enumerate(values)}
        config = run.config.model_copy(
            update={"evaluation": run.config.evaluation.model_copy(update={"metric": metric})}
        )
        report = replace(run.report, scores={"test": {metric: 0.5}}, by_client=own)
        return " ".join(write_sentences(group_runs([replace(run, config=config, report=report)])))

    assert "The worst client, c1, is 5.0 points below the clients' mean." in said("accuracy", [0.9, 0.8])
    assert "The worst client, c1, is 0.0100 above the clients' mean." in said("loss", [0.50, 0.52])


def test_scores() -> None:
    assert format_score_with_unit("loss", 0.5, 0.01) == "0.5000 ± 0.0100"
    assert format_score_with_unit("accuracy", None) == "-"
