"""What is planned to travel is what a run's ledger counts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny
from fedspan import FedspanError
from fedspan.cli import app
from fedspan.methods.registry import METHODS
from fedspan.runs.build import Prepared
from fedspan.runs.ledger import Ledger, read_totals
from fedspan.runs.planning import planned_traffic, target_layers

ROUNDS, RANK = 4, 3


def test_target_layers_are_those_of_the_loaded_model(prepared: Prepared, tiny_folder: Path) -> None:
    """By the config alone: a folder without weights will do."""
    bare = tiny_folder / "bare"
    bare.mkdir(exist_ok=True)
    (bare / "config.json").write_text((tiny_folder / "bert" / "config.json").read_text())
    found = target_layers(str(bare), tiny.BERT)
    expected = prepared.engine.adapted.spec.layers
    assert [layer.shape for layer in found] == [layer.shape for layer in expected]
    assert all(theirs.name.endswith(ours.name) for ours, theirs in zip(found, expected, strict=True))
    assert [layer.name.rpartition(".")[2] for layer in target_layers(str(bare))] == ["query", "value"] * 2


@pytest.mark.parametrize("key", METHODS)
def test_the_ledger_of_a_run_measures_what_was_planned(
    key: str, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    """Every client in every round, to the byte; the head is frozen, so it travels down once."""
    changes = {"federation": {"rounds": ROUNDS, "clients_per_round": None}, "model": {"extras": "frozen"}}
    config = tiny.config(tiny_folder, method={"name": key, "r": RANK, "lora_alpha": 6}, **changes)
    federation = tiny.variant(prepared, config).federation
    progress = federation.begin()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for number in range(1, ROUNDS + 1):
            result = federation.play(progress)
            progress = result.progress
            for one in result.transfers:
                ledger.record(number, one.client, one.direction, one.bytes, one.payload)
        ledger.commit()
    totals, clients = read_totals(tmp_path / "ledger.jsonl"), len(federation.members)
    (planned,) = planned_traffic(federation.method.spec.layers, RANK, clients, ROUNDS, [key])
    head = 4 * sum(math.prod(shape) for shape in federation.method.spec.extras.values())
    assert head > 0
    assert totals.round("down", 1).payload == clients * (planned.first_down + head)
    assert totals.round("up", 1).payload == clients * planned.first_up
    for direction, each in (("down", planned.later_down), ("up", planned.later_up)):
        later = sum(totals.round(direction, number).payload for number in range(2, ROUNDS + 1))  # type: ignore[arg-type]
        assert later == pytest.approx(clients * each * (ROUNDS - 1), rel=1e-12)


def test_the_command_shows_it(tiny_folder: Path) -> None:
    model = str(tiny_folder / "bert")
    asked = ["methods", "--model", model, "--rank", "2", "--clients", "3"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    assert "4 target layers, rank 2, 3 clients a round" in " ".join(shown.output.split())
    assert all(key in shown.output for key in METHODS)
    plain = json.loads(CliRunner().invoke(app, [*asked, "--targets", "query", "--json"]).output)
    assert [layer["shape"] for layer in plain["layers"]] == [[16, 16]] * 2
    fedit = next(row for row in plain["methods"] if row["method"] == "fedit")
    assert fedit == {"method": "fedit", **dict.fromkeys(("first_down", "first_up"), 4 * 2 * 2 * 32), **LATER}
    one = json.loads(CliRunner().invoke(app, ["methods", "fedit", *asked[1:], "--json"]).output)
    assert [row["method"] for row in one["methods"]] == ["fedit"]


LATER = dict.fromkeys(("later_down", "later_up"), 4.0 * 2 * 2 * 32)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--rank", "0"], "--rank"),
        (["--rank", "17"], "--rank"),
        (["--rounds", "1"], "--rounds"),
        (["--clients", "0"], "--clients"),
        (["--targets", "kwery"], "model.target_modules"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], field: str, tiny_folder: Path) -> None:
    result = CliRunner().invoke(app, ["methods", "--model", str(tiny_folder / "bert"), *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {field}: ")


def test_models_without_a_config_and_wrappers_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FedspanError) as caught:
        target_layers(str(tmp_path))
    assert caught.value.field == "--model"
    result = CliRunner().invoke(app, ["methods", "fedprox", "--model", str(tiny_folder / "bert")])
    assert result.stderr.startswith("error: METHOD: 'fedprox'; a method with --model")
