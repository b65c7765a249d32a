"""Final rounds: after the best round, clients also train on the examples that selected it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.data.partition import ClientPart, Partition
from fedspan.deployment.handshake import build_server_config
from fedspan.errors import FedspanError
from fedspan.federation.progress import RoundResult
from fedspan.planning.estimate import plan
from fedspan.progress.listener import Listener
from fedspan.run_folder import RunFolder
from fedspan.runs.final_rounds import finish_training
from fedspan.runs.ledger import read_totals
from fedspan.runs.selection import Selection, rate_round
from helpers import tiny
from helpers.command_line import done


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
    with pytest.raises(FedspanError, match="no examples are left to measure the model"):
        prepare(parse_config(values))
    with pytest.raises(FedspanError, match="cannot be run in a deployment"):
        build_server_config({"federation": {"final_rounds": 1}})
