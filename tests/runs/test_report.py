"""What a finished run leaves: its report, curve and files; divergence, in words; and what baselines are in it."""

import io
import json
import os
import re
import shutil
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.cli.run_summary import show_report
from fedspan.config import parse_config
from fedspan.core.lowrank import LowRank
from fedspan.data.partition import ClientPart, Partition
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.progress import Failure, Progress
from fedspan.logs import read_lines
from fedspan.methods.registry import METHODS
from fedspan.models.export import compute_layer_updates
from fedspan.progress.listener import Listener
from fedspan.reports.curves import read_curve
from fedspan.run_folder import RunFolder, compute_result_digests, read_records
from fedspan.runs import start
from fedspan.runs.baselines import build_local_only, build_pooled, train_baseline
from fedspan.runs.environment import record_environment
from fedspan.runs.final_rounds import compute_final_scores
from fedspan.runs.report import RunReport, read_partition, read_report
from fedspan.runs.warnings import count_failures, find_divergence, find_limited
from helpers import tiny
from helpers.families import methods_by_family, others_slow
from helpers.node_service import node, served
from helpers.task_cases import CASES, folders_of


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    fedspan.run(tiny.settings(tiny_folder, evaluation={"best_by": "loss"}), folder)
    return folder


def test_the_report_is_of_the_best_round_and_counts_all_messages(finished: Path) -> None:
    report, run = read_report(finished), RunFolder(finished)
    rows = {row["round"]: row for row in read_lines(run.metrics)}
    losses = {round: row["validation"]["loss"] for round, row in rows.items() if round}
    assert report.rounds == max(losses) == 2
    assert report.best_round == min(losses, key=losses.__getitem__)
    assert report.scores["test"]["loss"] == pytest.approx(rows[report.best_round]["test"]["loss"])
    for direction in ("down", "up"):
        sent = [row["bytes"] for row in read_lines(run.ledger) if row["direction"] == direction]
        assert report.bytes[direction] == sum(sent)
    assert set(report.by_client) == set(tiny.SITES)
    assert report.adapters == {"global": "adapter"}


def test_the_report_names_every_result_and_the_ends_of_the_logs(finished: Path) -> None:
    run = RunFolder(finished)
    records = read_records(run)
    digests = compute_result_digests(run)
    assert len(digests) > 2
    assert {name: records.files.get(name) for name in digests} == digests
    ends = {name: position.length for name, position in records.positions.items()}
    assert ends == {path.name: path.stat().st_size for path in (run.metrics, run.ledger)}


def test_the_exported_files_are_on_the_disk_before_the_report_that_names_them(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    RunFolder(folder).report.unlink()
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    fedspan.resume(folder)
    before = flushed[: flushed.index((folder / "report.json").stat().st_ino)]
    adapter = folder / "adapter"
    assert {path.stat().st_ino for path in (adapter, *adapter.rglob("*"))} <= set(before)
    assert read_report(folder).scores == read_report(finished).scores


@pytest.fixture
def recorded(tmp_path: Path) -> RunFolder:
    """A finished run with a global adapter, whose report names its files."""
    folder = RunFolder(tmp_path / "run")
    (folder.adapter / "east").mkdir(parents=True)
    for path in ("config.yaml", "environment.json", "adapter/weights", "adapter/README.md", "adapter/east/weights"):
        (folder.path / path).write_text(f"content of {path}")
    write_report(folder)
    return folder


def write_report(recorded: RunFolder, **changes: Any) -> None:
    logs = {"metrics.jsonl": [12, "ab"]}
    files = compute_result_digests(recorded)
    recorded.write_sealed(recorded.report, {"config": "digest", "files": files, "logs": logs, **changes})


@pytest.mark.parametrize("changes", [{"files": None}, {"logs": {"metrics.jsonl": [12]}}, {"logs": [1]}])
def test_a_report_without_them_is_refused(recorded: RunFolder, changes: dict[str, Any]) -> None:
    write_report(recorded, **changes)
    with pytest.raises(FedspanError, match="a report with config, files, logs"):
        read_records(recorded)


REPORT = RunReport(
    method="fedit",
    task="sequence-classification",
    metric="accuracy",
    rounds=3,
    best_round=2,
    scores={"test": {"accuracy": 0.5}},
    by_client={},
    bytes={"down": 4, "up": 3},
    seconds=1.5,
    examples=({"text": "a", "prediction": "b"},),
    warnings=("diverged",),
)
RECORDED: dict[str, Any] = {"config": "digest", "files": {}, "logs": {}}


def write_run(folder: Path, **changes: Any) -> Path:
    """A run's folder with its report and the partition of two clients."""
    folder.mkdir()
    files = RunFolder(folder)
    files.config.write_text("seed: 0")
    files.write_sealed(files.report, {**asdict(REPORT), **RECORDED, **changes})
    parts = [
        ClientPart(id, *(np.array(rows, dtype=np.int64) for rows in split))
        for id, split in {"east": ([0, 2], [1], []), "west": ([3], [], [4])}.items()
    ]
    files.partition.write_text(Partition(tuple(parts), 5).to_json() + "\n")
    return folder


def test_a_report_with_other_fields_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match=r"a report with .*best_round"):
        read_report(write_run(tmp_path / "more", accuracy=1.0))


def test_the_partition_has_the_examples_of_each_client(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    found = read_partition(folder)
    assert found.examples == 5
    assert {part.id: part.train.tolist() for part in found.clients} == {"east": [0, 2], "west": [3]}
    RunFolder(folder).partition.write_bytes(b"{\xff")
    with pytest.raises(FedspanError, match="partition"):
        read_partition(folder)


def test_failures_are_counted_by_client_with_the_last_one() -> None:
    """Sorted by client, whatever the order of the rounds' failures; those of the end are the last."""
    rows = [
        {"round": 1, "failures": [{"client": "b", "reason": "late"}, {"client": "a", "reason": "offline"}]},
        {"round": 2},
        {"round": 3, "failures": [{"client": "b", "reason": "offline"}, {"client": "b", "reason": "late"}]},
    ]
    found = count_failures(rows, 2, [Failure("c", 0, "full disk"), Failure("a", 0, "no adapter")])
    assert list(found) == ["a", "b", "c"]
    assert found == {
        "a": {"count": 2, "round": 2, "reason": "no adapter"},
        "b": {"count": 3, "round": 3, "reason": "late"},
        "c": {"count": 1, "round": 2, "reason": "full disk"},
    }


@pytest.mark.parametrize(
    "failures",
    [None, "late", 5, {"client": "a", "reason": "late"}, [None, "a", {"client": "a"}, {"client": 1, "reason": "x"}]],
)
def test_what_a_run_does_not_write_is_ignored(failures: object) -> None:
    assert count_failures([{"round": 1, "failures": failures}]) == {}


def test_a_client_that_was_limited_in_most_of_its_rounds_is_named() -> None:
    rows = [
        {"round": number, "cohort": ["a", "b", "c"], "clipped": {"a": 0.5, **({"b": 0.9} if number < 3 else {})}}
        for number in range(1, 7)
    ]
    (warning,) = find_limited([{"round": 0}, *rows])
    assert warning.startswith(
        "The changes of a were scaled down in 6 of its 6 rounds, to 50% on average (federation.clip_ratio)"
    )


def test_a_client_that_was_limited_twice_is_not_named() -> None:
    assert find_limited([{"cohort": ["a"], "clipped": {"a": 0.5}}] * 2) == ()
    assert find_limited([{"cohort": ["a"]}] * 9) == ()


def test_a_client_whose_weight_was_lowered_is_named_at_once() -> None:
    (warning,) = find_limited([{"cohort": ["a", "b"], "lowered_weights": {"b": 0.1}}, {"cohort": ["a"]}])
    assert warning.startswith(
        "The weight of b was lowered in 1 of its 1 rounds: it declares more examples than it was admitted with"
    )


def test_a_run_s_curve_is_its_metrics_and_its_ledger(tiny_folder: Path, tmp_path: Path) -> None:
    report = fedspan.run(tiny.config(tiny_folder, evaluation={"every": 2}, federation={"rounds": 3}), tmp_path / "run")
    curve = read_curve(RunFolder(tmp_path / "run"), report.metric)
    assert [point.round for point in curve] == [2, 3]
    assert curve[-1].bytes == report.bytes["down"] + report.bytes["up"]
    assert 0 < curve[0].bytes < curve[-1].bytes
    assert 0 < curve[0].seconds < curve[1].seconds


CONFIG = "seed: 1  # ключ\n"


def test_the_environment_is_recorded_once_and_compared_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        assert record_environment(run, 3, ["fedspan", "run"]) == {}
        first = run.environment.read_bytes()
        recorded = run.read_json(run.environment)
        assert recorded["fedspan"] == fedspan.__version__
        assert recorded["torch"] == torch.__version__
        assert recorded["command"] == ["fedspan", "run"]
        assert record_environment(run, 3, ["fedspan", "run", "--resume"]) == {}
        monkeypatch.setattr(fedspan, "__version__", "9")
        assert record_environment(run, 4, ["fedspan"]) == {"fedspan": (recorded["fedspan"], "9"), "seed": (3, 4)}
        assert run.environment.read_bytes() == first


def test_threads_are_those_that_the_config_asks_for(tmp_path: Path) -> None:
    """A resumed run is compared before its model is built, which sets them."""
    now = torch.get_num_threads()
    with RunFolder.create(tmp_path, CONFIG) as run:
        record_environment(run, 3, [])
        assert record_environment(run, 3, [], now + 1) == {"threads": (now, now + 1)}
        assert record_environment(run, 3, [], now) == {}


def test_scores_by_value_are_those_of_the_value_s_examples(tiny_folder: Path) -> None:
    made = prepare(tiny.config(tiny_folder, evaluation={"by": "site"}))
    progress = made.federation.begin()
    final = compute_final_scores(made, progress)
    assert list(final.by_value) == sorted(final.by_value)
    assert set(final.by_value) <= set(tiny.SITES)
    assert len(final.by_value) > 1
    assert np.array_equal(np.sort(np.concatenate([*made.test_parts.values()])), np.arange(len(made.test)))
    predictions = made.engine.predict(made.evaluator.build_job(progress, None), made.test, np.arange(len(made.test)), 3)
    for value, rows in made.test_parts.items():
        expected = made.task.compute_metrics(predictions[rows], made.test, rows.tolist())
        assert final.by_value[value]["accuracy"] == expected["accuracy"]
        assert final.by_value[value]["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert final.by_value[value]["examples"] == len(rows)
    right = sum(row["accuracy"] * row["examples"] for row in final.by_value.values())
    assert right / len(made.test) == pytest.approx(final.scores["test"]["accuracy"])


def test_scores_by_value_of_personal_models_are_means_over_the_clients(tiny_folder: Path) -> None:
    made = prepare(tiny.config(tiny_folder, evaluation={"by": "site"}, method={"name": "local-only"}))
    final = compute_final_scores(made, made.federation.begin())
    assert len(final.by_value) > 1
    for row in final.by_value.values():
        assert set(row["worst"]) == {"client", "accuracy"}
        assert row["worst"]["accuracy"] <= row["accuracy"]


def test_a_report_has_the_scores_by_value(tiny_folder: Path, tmp_path: Path) -> None:
    settings = tiny.settings(tiny_folder, evaluation={"by": "site"}, federation={"rounds": 1})
    report = fedspan.run({**settings, "baselines": ["centralized"]}, tmp_path / "run", progress=False)
    assert report.by_value
    assert set(report.by_value) <= set(tiny.SITES)
    assert set(report.baselines["centralized"]["by_value"]) == set(report.by_value)
    assert fedspan.read_report(tmp_path / "run").by_value == report.by_value


def rows(losses: list[float], accuracies: list[float] = [], scored: list[float] | None = None) -> list[dict[str, Any]]:  # noqa: B006
    """Lines of metrics: training losses, validation accuracies, and validation losses (the training losses)."""
    found: list[dict[str, Any]] = []
    for at, loss in enumerate(losses):
        row: dict[str, Any] = {"round": at + 1, "loss": loss, "cohort": ["a"]}
        if accuracies:
            row["validation"] = {"accuracy": accuracies[at], "loss": (scored or losses)[at]}
        found.append(row)
    return found


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (rows([1.0, 0.5, 0.4]), []),
        (rows([1.0, 1.9]), []),  # cohorts differ
        (rows([1.1, 7e12]), ["Training diverged", "1.1 in round 1", "7e+12 in round 2", "training.lr (now 0.01)"]),
        (rows([1.0, float("nan")]), ["Training diverged", "nan"]),
        (rows([1.0, 0.5], [0.8, 0.9], [0.6, 0.9]), []),  # overconfident, but more often right
        (rows([1.0, 0.5], [0.9, 0.8], [0.6, 0.5]), []),  # a few examples of a small part
        (rows([1.0, 0.5], [0.9, 0.4], [0.6, 1.5]), ["made the model worse", "90.0% after round 1", "40.0% after"]),
        (rows([1.0, 0.5], [0.9, 0.4], [0.6, float("nan")]), ["made the model worse"]),
        ([], []),
    ],
)
def test_signs_of_divergence(made: list[dict[str, Any]], words: list[str]) -> None:
    found = find_divergence(made, "accuracy", 0.01)
    assert bool(found) == bool(words)
    assert [word for word in words if word not in " ".join(found)] == []


def test_small_losses_may_rise_by_a_multiple() -> None:
    assert find_divergence(rows([0.0006, 0.0026], [1.0, 1.0]), "accuracy", 0.1, guess=log(3)) == ()
    assert find_divergence(rows([0.05, 0.12], [1.0, 1.0]), "accuracy", 0.1, guess=log(3)) != ()


def test_divergence_in_the_first_round() -> None:
    """All training losses are those of a diverged model, so they do not rise."""
    (note,) = find_divergence(rows([7e12, 6e12, 5e12]), "accuracy", 0.01, log(3))
    assert "the training loss is 5e+12 in round 3, and that of the untrained model 1.099" in note
    start = {"round": 0, "validation": {"accuracy": 0.5, "loss": 0.3}}
    (note,) = find_divergence([start, *rows([7e12], [0.5])], "accuracy", 0.01)
    assert "that of the untrained model 0.3" in note
    assert find_divergence([start, *rows([0.9], [0.5])], "accuracy", 0.01) == ()  # an average over the round
    assert find_divergence(rows([3.0, 2.9]), "accuracy", 0.01, log(3)) == ()


def test_a_worse_model_than_the_untrained_one_is_reported() -> None:
    """The training loss falls in all rounds, as the first one already diverged."""
    fallen = rows([9.0, 8.5, 8.0], [0.2, 0.2, 0.2])
    assert find_divergence(fallen, "accuracy", 0.01) == ()
    start = {"validation": {"accuracy": 0.5, "loss": 3.0}}
    (note,) = find_divergence(fallen, "accuracy", 0.01, start=start)
    assert "validation accuracy was 50.0% before training and is 20.0% after round 3" in note
    assert "Lower training.lr (now 0.01)" in note
    (note,) = find_divergence(fallen, "loss", 0.01, start=start)
    assert "validation loss was 3 before training and is 8 after round 3" in note
    (note,) = find_divergence(rows([1.0], [0.5], [3.1]), "loss", 0.01, start=start)
    assert "was 3 before training and is 3.1" in note
    assert find_divergence(rows([1.0], [0.5], [3.01]), "loss", 0.01, start=start) == ()  # noise
    improved = rows([2.0, 1.5], [0.6, 0.7])
    assert find_divergence(improved, "accuracy", 0.01, start=start) == ()
    # the untrained model guesses, so that it hides a loss of what the first round has learned
    start = {"validation": {"accuracy": 0.25, "loss": 1.5}}
    (note,) = find_divergence(rows([1.0, 0.5], [0.9, 0.4], [0.6, 1.5]), "accuracy", 0.01, start=start)
    assert "90.0% after round 1 and is 40.0%" in note


@pytest.mark.parametrize(("part", "name"), [("test", "test accuracy"), ("clients", "the clients' test accuracy")])
def test_test_scores_replace_missing_validation_scores(part: str, name: str) -> None:
    good, bad = {"accuracy": 0.9, "loss": 0.3}, {"accuracy": 0.3, "loss": 2.0}
    worse = [{**row, part: scores} for row, scores in zip(rows([0.5, 0.4]), (good, bad), strict=True)]
    (note,) = find_divergence(worse, "accuracy", 0.01)
    assert f"{name} was 90.0% after round 1 and is 30.0% after round 2" in note
    (note,) = find_divergence([{**worse[1]}], "accuracy", 0.01, start={part: good})
    assert f"{name} was 90.0% before training" in note
    unmeasured = [{**row, part: {"accuracy": row[part]["accuracy"]}} for row in worse]  # no loss
    (note,) = find_divergence(unmeasured, "accuracy", 0.01)
    assert "was 90.0% after round 1 and is 30.0%" in note
    unmeasured[1][part] = {"accuracy": 0.85}
    assert find_divergence(unmeasured, "accuracy", 0.01) == ()
    kept = {"validation": {"accuracy": 0.8, "loss": 0.5}}
    assert find_divergence([{**row, **kept} for row in worse], "accuracy", 0.01) == ()


_RATES = {"regression": 1.0, "preference": 1e2, "token-classification": 1e2, "multi-label-classification": 1e2}
"""Rates of SGD at which tasks' tiny models become worse, with finite losses; others are as bad before training."""


@pytest.mark.parametrize("name", others_slow(_RATES, ["regression", "preference"]))
def test_other_tasks_report_divergence_at_once(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    values = CASES[name].settings(folders_of(request, name, tmp_path))
    values["training"] = {**values["training"], "optimizer": "sgd", "max_grad_norm": 0.0, "lr": _RATES[name]}
    values["federation"]["rounds"] = 1
    report = fedspan.run(values, tmp_path / "run")
    assert [sign for sign in report.warnings if f"Lower training.lr (now {_RATES[name]:g})" in sign]


def test_a_resumed_run_knows_the_loss_of_the_untrained_model(tiny_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": "sgd", "lr": 30.0, "max_grad_norm": 0.0}
    values = tiny.settings(
        tiny_folder, "deep-bert", training=changes, federation={"rounds": 1}, partition={"validation": 0.2}
    )
    report = fedspan.run(values, tmp_path / "run")
    found = re.search(r"that of the untrained model (\d+\.\d+)", report.warnings[0])
    assert float(found[1]) > round(log(len(tiny.LABELS)), 3)  # measured, and not the loss of a guess
    assert fedspan.run(values, tmp_path / "run", resume=True).warnings == report.warnings


def test_a_diverged_run_is_reported_in_the_api_and_on_the_last_screen(tiny_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": "sgd", "lr": 30.0, "max_grad_norm": 0.0}
    report = fedspan.run(tiny.settings(tiny_folder, training=changes, federation={"rounds": 3}), tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] > 2 * losses[0]
    assert "Training diverged" in report.warnings[0]
    assert fedspan.read_report(tmp_path / "run").warnings == report.warnings
    out = io.StringIO()
    show_report(Console(file=out, width=80), report, tmp_path / "run")
    assert f"warning: {report.warnings[0]}" in out.getvalue()
    out = io.StringIO()
    show_report(Console(file=out, width=80), replace(report, warnings=()), tmp_path / "run")
    assert "warning" not in out.getvalue()


def test_a_deployment_reports_divergence_in_its_first_round(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path / "node"))
    changes: dict[str, Any] = {"optimizer": "sgd", "lr": 300.0, "max_grad_norm": 0.0, "local_steps": 6}
    prepared, _ = served(tiny_folder, service, training=changes, federation={"rounds": 1})
    report = start.run(prepared.config, tmp_path / "run", build=lambda *_: prepared)
    assert f"that of the untrained model {log(len(tiny.LABELS)):.4g}. Lower training.lr" in report.warnings[0]


def test_hidden_and_lost_numbers_are_no_sign() -> None:
    """Losses are null where clients keep them to themselves, and scores where they are not finite."""
    rows = [
        {"round": one, "cohort": ["a"], "loss": None, "validation": {"loss": None, "accuracy": 0.5}} for one in (1, 2)
    ]
    assert find_divergence(rows, "accuracy", 0.1) == ()
    assert find_divergence(rows, "loss", 0.1) == ()


class RecordingListener(Listener):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.losses: list[float] = []

    def on_baseline_start(self, name: str, rounds: int) -> None:
        self.events.append((name, rounds))

    def on_baseline_round(self, name: str, round: int, loss: float) -> None:
        self.events.append((name, round))
        self.losses.append(loss)


def run_rounds(run: Prepared) -> Progress:
    progress = run.federation.begin()
    while progress.state.round < run.federation.settings.rounds:
        progress = run.federation.run_round(progress).progress
    return progress


def test_centralized_training_has_everybody_s_examples_and_its_own_learning_rate(prepared: Prepared) -> None:
    made = build_pooled(replace(prepared, config=prepared.config.model_copy(update={"centralized_lr": 0.003})))
    (client_data,) = made.federation.clients.values()
    for part in ("train", "validation", "test"):
        wanted = np.concatenate([getattr(one, part) for one in prepared.federation.clients.values()])
        assert np.array_equal(np.sort(getattr(client_data, part)), np.sort(wanted))
    assert made.engine.settings.lr == 0.003
    assert made.engine.settings.optimizer_state == "keep"
    assert build_pooled(prepared).engine.settings.lr == prepared.config.training.lr
    assert prepared.engine.settings.optimizer_state == "reset"


def test_local_only_training_sends_nothing_and_keeps_a_model_a_client(prepared: Prepared) -> None:
    made = build_local_only(prepared)
    first = made.federation.run_round(made.federation.begin())
    assert first.cohort == tuple(sorted(tiny.SITES))  # everybody, whatever the run's cohort
    # The initial head reaches everybody once, so that all start alike; after that nothing is transmitted.
    second = made.federation.run_round(first.progress)
    assert {transfer.payload for transfer in second.transfers} == {0}
    models = list(made.evaluator.iterate_models(second.progress))
    assert [ids for ids, _ in models] == [(id,) for id in sorted(tiny.SITES)]
    updates = [compute_layer_updates(job, second.progress.state.base, made.engine.adapted) for _, job in models]
    layer = next(iter(updates[0]))
    changes = [update[layer] for update in updates]
    assert all(isinstance(change, LowRank) and change.to_dense().any() for change in changes)
    assert not np.allclose(changes[0].to_dense(), changes[1].to_dense())


def test_a_baseline_takes_the_federation_s_rounds_and_tells_of_each(prepared: Prepared, tmp_path: Path) -> None:
    told = RecordingListener()
    result = train_baseline(prepared, "local-only", told, tmp_path / "local")
    rounds = prepared.federation.settings.rounds
    assert told.events == [("local-only", rounds), *[("local-only", number) for number in range(1, rounds + 1)]]
    assert 1 <= result["best_round"] <= rounds
    assert set(result["by_client"]) == set(tiny.SITES)
    assert result["scores"]["test"]["worst"]["accuracy"] <= result["scores"]["test"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_baselines_share_hidden_states_with_the_run_to_the_bit(engine: str, tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, "deep-bert", model={"layers_to_transform": [1]}, engine={"name": engine})
    after, alone = prepare(parse_config(values)), prepare(parse_config(values))
    after.evaluator.evaluate_clients(run_rounds(after))
    told = {number: RecordingListener() for number in range(2)}
    for number, run in enumerate((after, alone)):
        for name in ("local-only", "centralized"):
            train_baseline(run, name, told[number], tmp_path / f"{number}-{name}")
    cache = after.engine.prefixes.get_cache(after.train)
    assert cache.computed[build_pooled(after).federation.clients["all"].train].all()
    assert build_pooled(after).engine.prefixes is after.engine.prefixes
    assert told[0].losses == told[1].losses
    assert len(told[0].losses) == 2 * values["federation"]["rounds"]


@pytest.mark.parametrize("name", [pytest.param("local-only", marks=pytest.mark.slow), "centralized"])
def test_a_stopped_baseline_continues_to_the_same_scores(name: str, prepared: Prepared, tmp_path: Path) -> None:
    class Stopping(RecordingListener):
        def on_baseline_round(self, name: str, round: int, loss: float) -> None:
            super().on_baseline_round(name, round, loss)
            if round == 1:
                raise KeyboardInterrupt

    straight = train_baseline(prepared, name, RecordingListener(), tmp_path / "straight")
    folder, rounds = tmp_path / "stopped", prepared.federation.settings.rounds
    with pytest.raises(KeyboardInterrupt):
        train_baseline(prepared, name, Stopping(), folder)
    again, afterwards = RecordingListener(), RecordingListener()
    assert train_baseline(prepared, name, again, folder) == straight
    assert again.events == [(name, rounds), *[(name, number) for number in range(2, rounds + 1)]]
    assert train_baseline(prepared, name, afterwards, folder) == straight
    assert afterwards.events == []
    assert {entry.name for entry in folder.iterdir()} == {"predictions", "report.json"}
    assert set(straight["by_client"]) == set(tiny.SITES)


@pytest.mark.parametrize("key", methods_by_family(quick=["flora", "fedsa-lora"]))
def test_peft_gives_the_accuracy_that_the_run_reports(key: str, tiny_folder: Path, tmp_path: Path) -> None:
    """For personal methods one adapter a client, whose mean the report gives."""
    values = tiny.settings(tiny_folder, method={"name": key}, federation={"clients_per_round": None, "rounds": 2})
    report = fedspan.run(values, tmp_path / "run")
    assert set(report.adapters) == (set(tiny.SITES) if METHODS[key].claims.personal else {"global"})
    clients = [None if id == "global" else id for id in report.adapters]
    measured = [fedspan.evaluate(tmp_path / "run", client)["accuracy"] for client in clients]
    assert np.mean(measured) == pytest.approx(report.scores["test"]["accuracy"])
