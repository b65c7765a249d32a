"""``training.lr: auto``: what the range test chooses, that it is stored and repeatable, and where it is refused."""

import json
import math
import shutil
from pathlib import Path

import pytest

import fedspan
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.deployment.handshake import build_server_config
from fedspan.errors import FedspanError
from fedspan.runs.learning_rate import EXPONENTS, choose_rate, run_range_test, set_rate
from helpers import tiny
from helpers.listeners import Notes
from helpers.refusals import refused

AUTO = {"lr": "auto"}


def rates(folder: Path) -> list[float]:
    return [json.loads(line)["lr"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_smallest_of_the_rates_that_are_about_as_good_is_chosen() -> None:
    assert choose_rate(1.0, ((1e-3, 0.9), (1e-2, 0.505), (1e-1, 0.5))) == 1e-2
    assert choose_rate(1.0, ((1e-3, 0.9), (1e-2, 0.51), (1e-1, 0.5))) == 1e-1
    assert choose_rate(1.0, ((1e-3, 1.2), (1e-2, 1.1), (1e-1, math.inf))) == 1e-2  # all are worse than the start
    with refused("training.lr"):
        choose_rate(1.0, ((1e-3, math.inf), (1e-2, math.inf)))


def test_a_range_test_tries_rates_around_the_default_and_is_repeatable(tiny_folder: Path, interrupted: Path) -> None:
    prepared = prepare(parse_config(tiny.settings(tiny_folder, training=AUTO)))
    default = prepared.config.default_lr
    found = run_range_test(prepared, default)
    assert [lr for lr, _ in found.losses] == pytest.approx([default * 10 ** (power / 2) for power in EXPONENTS])
    assert found.lr == choose_rate(found.start, found.losses)
    assert len({loss for _, loss in found.losses}) == len(EXPONENTS)
    assert min(loss for _, loss in found.losses) < found.start
    assert found.to_json_values() == json.loads((interrupted / "learning_rate.json").read_text())
    assert set_rate(prepared, 0.5).federation.training.compute_lr(0, 3) == 0.5
    assert prepared.federation.training.compute_lr(0, 3) == default


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_run_trains_with_the_chosen_rate_and_stores_the_test(engine: str, tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, training=AUTO, engine={"name": engine})
    report = fedspan.run(values, tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "learning_rate.json").read_text())
    assert report.learning_rate == stored
    assert set(rates(tmp_path / "run")) == {stored["lr"]}
    assert [trial["lr"] for trial in stored["losses"]] == sorted(trial["lr"] for trial in stored["losses"])
    assert fedspan.read_report(tmp_path / "run") == report
    fixed = tiny.settings(tiny_folder, training={"lr": stored["lr"]}, engine={"name": engine})
    assert fedspan.run(fixed, tmp_path / "fixed").scores == report.scores


@pytest.fixture(scope="module")
def interrupted(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(tiny.settings(tiny_folder, training=AUTO, federation={"rounds": 3}), folder, listener=Notes(1))
    return folder


def test_a_resumed_run_uses_the_stored_rate(interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    (chosen,) = rates(folder)
    monkeypatch.setattr("fedspan.runs.start.run_range_test", None)  # it is not run again
    fedspan.resume(folder)
    assert rates(folder) == [chosen] * 3


def test_a_stored_rate_that_was_damaged_is_an_error(interrupted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    for content in ("{}", '{"lr": -1}', '{"lr": true}', '{"lr": Infinity}', "[1]", "not json"):
        (folder / "learning_rate.json").write_text(content)
        with pytest.raises(FedspanError, match=r"learning_rate\.json"):
            fedspan.resume(folder)


@pytest.mark.slow
def test_centralized_training_has_a_range_test_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, training=AUTO, federation={"rounds": 1})
    values["baselines"] = ["centralized", "local-only"]
    report = fedspan.run(values, tmp_path / "run")
    own = report.baselines["centralized"]["learning_rate"]
    assert own["losses"] != report.learning_rate["losses"]
    assert "learning_rate" not in report.baselines["local-only"]
    assert {entry.name for entry in (tmp_path / "run" / "baselines" / "centralized").iterdir()} == {"report.json"}
    named = fedspan.run(values | {"centralized_lr": 0.01, "baselines": ["centralized"]}, tmp_path / "named")
    assert "learning_rate" not in named.baselines["centralized"]


def test_it_is_refused_where_no_validation_part_or_no_example_can_be_used(tiny_folder: Path) -> None:
    given = tiny.settings(tiny_folder, training=AUTO)
    with refused("training.lr"):
        parse_config({**given, "partition": {**given["partition"], "validation": 0.0}})
    with pytest.raises(FedspanError, match="privacy budget"):
        parse_config({**given, "privacy": {"mechanism": "local", "epsilon": 3.0}})
    remote = {key: value for key, value in given.items() if key not in ("data", "partition")}
    with pytest.raises(FedspanError, match="no examples to test rates on"):
        build_server_config({**remote, "data": {"labels": list(tiny.LABELS)}, "partition": {"clients": 2}})
    for wrong in (0, -1.0, "fast", True, float("inf"), None):
        with pytest.raises(FedspanError, match="a number above 0, or auto"):
            parse_config(tiny.settings(tiny_folder, training={"lr": wrong}))
