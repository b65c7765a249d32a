"""Runs that get more rounds: the same bits as if planned so, or a refusal; and final rounds on all examples."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from click.testing import Result

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.config.reading import override
from fedspan.config.run import RunConfig
from fedspan.data.partition import ClientPart, Partition
from fedspan.deployment.handshake import build_server_config
from fedspan.errors import FedspanError
from fedspan.federation.progress import RoundResult
from fedspan.planning.estimate import plan
from fedspan.progress.listener import Listener
from fedspan.run_folder import RunFolder
from fedspan.runs import extension, selection, start
from fedspan.runs.environment import is_same_environment
from fedspan.runs.final_rounds import finish_training
from fedspan.runs.integrity import ROUNDS_FIELD, list_differences, read_config, require_independent_rounds
from fedspan.runs.learning_rate import ROUNDS
from fedspan.runs.ledger import read_totals
from fedspan.runs.selection import Best, Selection, rate_round
from helpers import refusals, tiny
from helpers.command_line import done
from helpers.families import others_slow
from helpers.listeners import Notes
from helpers.refusals import refused
from helpers.run_content import content

CASES: dict[str, dict[str, Any]] = {
    "moments": {"training": {"optimizer_state": "keep", "warmup_rounds": 3}},
    "head": {"model": {"head_init": "lda"}, "baselines": ["centralized"]},
    "personal": {"method": {"name": "fedsa-lora"}},
    "cycles": {"training": {"schedule": "cosine", "cycle_rounds": 2}},
}


def values(folder: Path, rounds: int, case: str = "", **changes: Any) -> dict[str, Any]:
    sections = dict(CASES.get(case, changes))
    baselines = sections.pop("baselines", [])
    federation = {**sections.pop("federation", {}), "rounds": rounds}
    return {**tiny.settings(folder, federation=federation, **sections), "baselines": baselines}


def assert_same(one: Path, other: Path) -> None:
    left, right = content(one), content(other)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


@pytest.mark.parametrize("case", others_slow(CASES, ["moments"]))
def test_an_extended_run_has_the_bits_of_one_that_was_planned_so(case: str, tiny_folder: Path, tmp_path: Path) -> None:
    fedspan.run(values(tiny_folder, 4, case), tmp_path / "planned")
    short = fedspan.run(values(tiny_folder, 2, case), tmp_path / "extended")
    seen = Notes()
    long = fedspan.resume(tmp_path / "extended", overrides=["federation.rounds=4"], listener=seen)
    assert (short.rounds, long.rounds) == (2, 4)
    assert_same(tmp_path / "planned", tmp_path / "extended")
    assert seen.notes[0] == "federation.rounds is 4 from now on, and was 2"
    baselines = "the baselines are trained again, because their number of epochs is that of the rounds"
    assert (baselines in seen.notes) == (case == "head")
    again = fedspan.run(values(tiny_folder, 4, case), tmp_path / "extended", resume=True)
    assert again == long, "nothing is left to do"


@pytest.mark.slow
def test_an_interrupted_run_gets_another_number_of_rounds(tiny_folder: Path, tmp_path: Path) -> None:
    fedspan.run(values(tiny_folder, 2), tmp_path / "planned")
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values(tiny_folder, 3), tmp_path / "run", listener=Notes(1))
    fedspan.run(values(tiny_folder, 2), tmp_path / "run", resume=True)
    assert_same(tmp_path / "planned", tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values(tiny_folder, 4), tmp_path / "run", resume=True, listener=Notes(3))
    fedspan.resume(tmp_path / "run")
    fedspan.run(values(tiny_folder, 4), tmp_path / "four")
    assert_same(tmp_path / "four", tmp_path / "run")


def test_an_extension_that_is_interrupted_leaves_the_run_under_its_old_config(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = fedspan.run(values(tiny_folder, 2), tmp_path / "run")
    before = content(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(extension, "write_atomic", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fedspan.resume(tmp_path / "run", overrides=["federation.rounds=3"])
    assert fedspan.resume(tmp_path / "run") == report
    assert content(tmp_path / "run") == before


def test_an_extension_that_is_interrupted_before_its_report_goes_on(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new adapter is there, and no report names the old one."""
    fedspan.run(values(tiny_folder, 2), tmp_path / "planned")
    fedspan.run(values(tiny_folder, 1), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(start, "compute_result_digests", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fedspan.resume(tmp_path / "run", overrides=["federation.rounds=2"])
    assert (tmp_path / "run" / "adapter").is_dir()
    assert not (tmp_path / "run" / "report.json").exists()
    fedspan.resume(tmp_path / "run")
    assert_same(tmp_path / "planned", tmp_path / "run")


def test_an_interrupted_run_goes_on_with_other_resources(tiny_folder: Path, tmp_path: Path) -> None:
    """As on a cluster that has fewer workers today; what was finished keeps its config."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values(tiny_folder, 3, engine={"name": "loop"}), folder, listener=Notes(1))
    seen = Notes()
    overrides = ["engine.name=batched", "engine.clients_per_pass=2", "evaluation.batch_size=7"]
    report = fedspan.resume(folder, overrides=overrides, listener=seen)
    assert report.rounds == 3
    assert "engine.name is batched from now on, and was loop" in seen.notes
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["engine"]["name"], config["evaluation"]["batch_size"]) == ("batched", 7)
    before = content(folder)
    assert fedspan.resume(folder, overrides=["engine.name=loop"]) == report
    assert content(folder) == before
    assert not is_same_environment(RunFolder(folder), read_config(folder)), "no series uses it as one of equal bits"


def test_changes_are_recorded_as_overrides() -> None:
    model, data = {"name": "builtin:all-minilm-l6-v2"}, {"train": "builtin:review-sentences"}
    before = parse_config({"model": model, "data": data, "cluster": {"workers": 2}})
    after = parse_config({"model": model, "data": data, "device": "cpu", "engine": {"padding_free": False}})
    texts = extension.list_overrides(list_differences(before, after), after)
    assert sorted(texts) == ["cluster=null", 'device="cpu"', "engine.padding_free=false"]
    assert parse_config(override(before.model_dump(mode="json"), texts)) == after


def test_an_edited_number_of_rounds_is_found_in_a_finished_run(tiny_folder: Path, tmp_path: Path) -> None:
    fedspan.run(values(tiny_folder, 2), tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("rounds: 2", "rounds: 9"))
    with pytest.raises(FedspanError, match="it is 9 now, and the run began with 2"):
        fedspan.resume(tmp_path / "run")


PATIENCE = "federation.early_stopping"
REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "cosine": ({"training": {"schedule": "cosine"}}, [f"{ROUNDS_FIELD}=4"], ROUNDS_FIELD),
    "linear": ({"training": {"schedule": "linear"}}, [f"{ROUNDS_FIELD}=4"], ROUNDS_FIELD),
    "fewer": ({}, [f"{ROUNDS_FIELD}=1"], ROUNDS_FIELD),
    "other": ({}, ["training.lr=0.5"], "training.lr"),
    "seed": ({}, [f"{ROUNDS_FIELD}=4", "seed=9"], "seed"),
    "data": ({}, ["data.train=other.csv"], "data.train"),
    "method": ({}, ["method.name=rolora"], "method.name"),
    "less-patience": ({"federation": {"early_stopping": 3}}, [f"{PATIENCE}=1"], PATIENCE),
    "patience-at-last": ({}, [f"{PATIENCE}=1"], PATIENCE),
}
"""Changes of a run's config, overrides when it is resumed, and the field that is named."""


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    fedspan.run(values(tiny_folder, 2), folder)
    return folder


@pytest.mark.parametrize("case", others_slow(REFUSED, REFUSED.keys() - {"linear"}))
def test_a_change_of_finished_rounds_is_refused(case: str, finished: Path, tiny_folder: Path, tmp_path: Path) -> None:
    changes, overrides, field = REFUSED[case]
    folder = tmp_path / "run" if changes else finished
    if changes:
        fedspan.run(values(tiny_folder, 2, **changes), folder)
    before = content(folder)
    with refused(field):
        fedspan.resume(folder, overrides=overrides)
    assert content(folder) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_change_that_this_machine_cannot_make_leaves_the_run_as_it_was(finished: Path) -> None:
    before = content(finished)
    with refusals.refused("device", "cuda"):
        fedspan.resume(finished, overrides=["federation.rounds=4", "device=cuda"])
    (finished / "progress.json").unlink()  # says why
    assert content(finished) == before


def test_a_run_with_a_fixed_noise_gets_more_rounds(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    fedspan.run(values(tiny_folder, 1, privacy={"mechanism": "local", "clip": 1.0, "noise": 0.5}), tmp_path / "run")
    assert fedspan.resume(tmp_path / "run", overrides=["federation.rounds=2"]).rounds == 2


@pytest.mark.slow
def test_early_stopping_ends_an_extended_run_unless_it_gets_more_patience(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {1: 0.2, 2: 0.5, 3: 0.4, 4: 0.1, 5: 0.6, 6: 0.3}
    monkeypatch.setattr(selection, "rate_round", lambda metric, number, _: Best(scores[number], 0.0, number))
    stopped = fedspan.run(values(tiny_folder, 5, federation={"early_stopping": 2}), tmp_path / "run")
    assert stopped.rounds == 4
    with refused("federation.early_stopping"):
        fedspan.resume(tmp_path / "run", overrides=["federation.rounds=6"])
    overrides = ["federation.rounds=6", "federation.early_stopping=null"]
    assert fedspan.resume(tmp_path / "run", overrides=overrides).best_round == 5
    fedspan.run(values(tiny_folder, 6), tmp_path / "planned")
    assert_same(tmp_path / "planned", tmp_path / "run")


def test_a_last_round_that_was_measured_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    seen = Notes()
    fedspan.run(values(tiny_folder, 3, evaluation={"every": 2}), tmp_path / "run")
    fedspan.resume(tmp_path / "run", overrides=["federation.rounds=5"], listener=seen)
    assert seen.notes[1] == "round 3 was measured as the last one, though evaluation.every is 2"


def test_the_command_line(
    call: Callable[..., Any],
    refused: Callable[..., str],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, folder = tmp_path / "my.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(values(tiny_folder, 2)))
    monkeypatch.setattr(sys, "argv", ["fedspan", "run", str(path), "--out", str(folder)])
    assert call("run", path, "--out", folder).exit_code == 0
    result = call("run", "--resume", folder, "--set", "federation.rounds=3")
    assert result.exit_code == 0, result.output
    assert "note: federation.rounds is 3 from now on, and was 2" in result.output
    assert "resumed after round 2 of 3" in result.output
    card = (folder / "adapter" / "README.md").read_text()
    assert "fedspan run my.yaml --out run --set federation.rounds=3\n" in card
    said = refused("run", "--resume", folder, "--set", "training.lr=1")
    assert said.startswith("`training.lr`: the config with which this run began has 0.02, and only federation.rounds")


def config(rounds: int, **changes: Any) -> RunConfig:
    federation = {"rounds": rounds, **changes.pop("federation", {})}
    return parse_config({"data": {"train": "train.csv"}, "federation": federation, **changes})


@pytest.mark.parametrize(
    ("changes", "done", "before", "after"),
    [
        ({"training": {"schedule": "constant"}}, 4, 5, 9),
        ({"training": {"schedule": "linear"}}, 0, 5, 9),
        ({"training": {"schedule": "linear", "warmup_rounds": 2}}, 2, 5, 9),
        ({"training": {"schedule": "cosine", "cycle_rounds": 2}}, 4, 5, 9),
        ({"training": {"lr": "auto"}}, 4, ROUNDS, ROUNDS + 5),
        ({"privacy": {"mechanism": "dp-sgd", "noise": 1.0}}, 4, 5, 9),
    ],
)
def test_rounds_that_owe_it_nothing_are_continued(changes: dict[str, Any], done: int, before: int, after: int) -> None:
    require_independent_rounds(done, config(before, **changes), config(after, **changes))


@pytest.mark.parametrize(
    ("changes", "done", "before", "after", "why"),
    [
        (
            {"training": {"schedule": "linear"}},
            2,
            5,
            9,
            "training.schedule linear spreads over all rounds, and the 2 finished rounds had the learning rates of a "
            "run of 5 rounds. Start a new run with federation.rounds=9",
        ),
        ({"training": {"schedule": "cosine", "warmup_rounds": 1}}, 3, 5, 4, "training.schedule cosine spreads"),
        (
            {"privacy": {"mechanism": "dp-sgd", "epsilon": 3.0}},
            0,
            5,
            9,
            "privacy.epsilon is the budget of the 5 rounds that were planned. Start a new run",
        ),
        ({"training": {"lr": "auto"}}, 1, 1, 9, f"the range test of training.lr ran 1 of {ROUNDS} rounds"),
    ],
)
def test_other_rounds_are_refused(changes: dict[str, Any], done: int, before: int, after: int, why: str) -> None:
    with pytest.raises(FedspanError) as caught:
        require_independent_rounds(done, config(before, **changes), config(after, **changes))
    assert why in str(caught.value)
    assert (caught.value.field, caught.value.value) == (ROUNDS_FIELD, after)


def settings(folder: Path, **federation: Any) -> dict[str, Any]:
    """Three rounds, of which validation selects one, and two final rounds."""
    training = {"schedule": "cosine", "local_epochs": 1, "local_steps": None, "batch_size": 32}
    values = tiny.settings(folder, training=training)
    values["federation"] = {"rounds": 3, "final_rounds": 2, **federation}
    values["partition"]["validation"] = 0.25
    return values


def select(prepared: Prepared, rounds: int) -> tuple[Any, Selection]:
    """The progress after some rounds, and a selection whose best round it is."""
    progress = prepared.federation.begin()
    for _ in range(rounds):
        progress = prepared.federation.run_round(progress).progress
    best = rate_round("accuracy", rounds, {"accuracy": 0.5, "loss": 1.0})
    return progress, Selection(best, best, measured=True)


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_final_rounds_are_rounds_of_clients_with_all_their_examples(
    tiny_folder: Path, tmp_path: Path, weights: str
) -> None:
    values = settings(tiny_folder, weights=weights)
    prepared = prepare(parse_config(values))
    best, selection = select(prepared, 2)
    results: list[RoundResult] = []
    after, final = finish_training(prepared, best, selection, RunFolder(tmp_path), results.append)

    whole = [
        ClientPart(part.id, np.sort(np.concatenate([part.train, part.validation])), np.empty(0, np.int64), part.test)
        for part in prepared.partition.clients
    ]
    lr = prepared.federation.training.compute_lr(1, 3)  # that of the second round, the best one
    values["training"] |= {"lr": lr, "schedule": "constant"}
    other = prepare(parse_config(values), Partition(whole, prepared.partition.examples))
    expected = best
    for _ in range(2):
        expected = other.federation.run_round(expected).progress
    assert after.state.round == 4
    assert [result.lr for result in results] == [lr, lr]
    for name, tensor in expected.state.tensors.items():
        assert torch.equal(after.state.tensors[name], tensor), name
    assert not torch.equal(after.state.tensors[name], best.state.tensors[name])
    validation, _ = prepared.evaluator.evaluate_clients(best)
    assert final.scores["validation"] == validation.pooled  # not of the model that trained on these examples
    assert final.scores["test"] == prepared.evaluator.evaluate_heldout(after, prepared.test)["global"]


def test_without_a_trained_best_round_there_are_none(tiny_folder: Path, tmp_path: Path) -> None:
    prepared = prepare(parse_config(settings(tiny_folder)))
    start, selection = select(prepared, 0)
    for best, selected in ((start, selection), (select(prepared, 1)[0], Selection())):
        after, _ = finish_training(prepared, best, selected, RunFolder(tmp_path), lambda _: pytest.fail("a round"))
        assert after is best


class Killed(Listener):
    def on_note(self, text: str) -> None:
        if "final rounds" in text:
            raise KeyboardInterrupt


def test_a_run_reports_what_was_tested_and_resumes_to_the_same_bits(
    call: Callable[..., Result], tiny_folder: Path, tmp_path: Path
) -> None:
    values = {**settings(tiny_folder), "baselines": ["centralized"]}
    report = fedspan.run(values, tmp_path / "straight", progress=False)
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values, tmp_path / "killed", listener=Killed(), progress=False)
    again = fedspan.resume(tmp_path / "killed", progress=False)
    name = "adapter/adapter_model.safetensors"
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    assert (again.scores, again.bytes, again.baselines) == (report.scores, report.bytes, report.baselines)
    assert again.final_rounds == report.final_rounds == 2

    run = RunFolder(tmp_path / "straight")
    plain = fedspan.run({**values, "federation": {"rounds": 3}}, tmp_path / "plain", progress=False)
    assert plain.best_round == report.best_round
    assert report.scores["validation"] == plain.scores["validation"]
    assert report.scores["test"] != plain.scores["test"]
    assert report.baselines["centralized"]["scores"]["test"] != plain.baselines["centralized"]["scores"]["test"]
    assert read_totals(run.ledger).rounds == (1, 2, 3, 4, 5)
    assert plan(parse_config(values)).rounds == 5
    assert report.bytes["up"] > plain.bytes["up"]

    sentence = "2 final rounds on all examples, validation included"
    assert sentence in (run.adapter / "README.md").read_text()
    done(call("report", run.path, "--out", tmp_path / "page.html"))
    assert sentence in (tmp_path / "page.html").read_text()
    fedspan.export(run.path, tmp_path / "best", round=report.best_round)
    fedspan.export(tmp_path / "plain", tmp_path / "other")
    model = "adapter_model.safetensors"
    assert (tmp_path / "best" / model).read_bytes() == (tmp_path / "other" / model).read_bytes()


@pytest.mark.parametrize(
    ("section", "change", "reason"),
    [
        ("partition", {"validation": 0}, "without partition.validation"),
        ("privacy", {"mechanism": "dp-sgd", "noise": 1.0, "clip": 1.0}, "privacy budget"),
        ("federation", {"secure": {}}, "one session for each round"),
        ("cluster", {"workers": 2}, "workers of the cluster"),
    ],
)
def test_final_rounds_that_do_not_fit(tiny_folder: Path, section: str, change: dict[str, Any], reason: str) -> None:
    values = settings(tiny_folder)
    values[section] = {**values.get(section, {}), **change}
    with pytest.raises(FedspanError, match=reason) as caught:
        parse_config(values)
    assert caught.value.field == "federation.final_rounds"


def test_final_rounds_need_a_test_set_and_examples_of_this_machine(tiny_folder: Path) -> None:
    values = settings(tiny_folder)
    values["data"]["test_fraction"] = 0
    with refusals.refused("federation.final_rounds"):
        prepare(parse_config(values))
    with refusals.refused("federation.final_rounds"):
        build_server_config({"federation": {"final_rounds": 1}})
