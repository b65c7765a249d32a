"""A task of one's own, registered or from an installed package, is run like any other; what is none is refused."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from fedspan import FedspanError
from fedspan.config import parse_config
from fedspan.tasks import registry
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.metrics import METRICS, Metric
from fedspan.tasks.registry import TASKS, get_task, register_task
from fedspan.tasks.trainer import TrainerExamples, TrainerTask
from helpers import tiny
from helpers.refusals import refused
from helpers.sharpened_task import OWN

PACKAGE = """
from dataclasses import replace
from fedspan.tasks.regression import REGRESSION

PACKAGED = replace(REGRESSION, name="packaged")
OTHER = replace(REGRESSION, name="another-name")
"""


def test_it_is_run_evaluated_and_planned_like_any_other(tiny_folder: Path, tmp_path: Path) -> None:
    fedspan.register_task(OWN)
    values = tiny.settings(tiny_folder, federation={"rounds": 1})
    values |= {"task": "sharpened", "task_options": {"sharpness": 3.0}}
    report = fedspan.run(values, tmp_path / "run")
    assert (report.task, report.metric) == ("sharpened", "confidence")
    measured = fedspan.evaluate(tmp_path / "run")
    assert measured["confidence"] == pytest.approx(report.scores["test"]["confidence"], abs=1e-6)
    assert fedspan.read_notes(tmp_path / "run" / "adapter")["options"] == {"sharpness": 3.0}
    label, probability = fedspan.predict(tmp_path / "run", ["admin1 admin2"])[0]
    assert label in tiny.LABELS
    assert 0.25 < probability <= 1
    assert fedspan.plan(values, labels=4, clients=4).client.base > 0
    assert "confidence" in fedspan.report([tmp_path / "run"], tmp_path / "page.html").read_text(encoding="utf-8")


def test_without_the_package_a_run_names_the_task(tiny_folder: Path, tmp_path: Path) -> None:
    fedspan.register_task(OWN)
    fedspan.run(tiny.settings(tiny_folder, federation={"rounds": 1}) | {"task": "sharpened"}, tmp_path / "run")
    registry._tasks.pop("sharpened")
    with pytest.raises(
        FedspanError,
        match=r"fedspan\.json\.task`: no task is named 'sharpened'.* register it first .*fedspan\.register_task",
    ):
        fedspan.predict(tmp_path / "run", ["admin1"])


def test_other_processes_do_not_know_a_task_of_this_one(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder) | {"cluster": {"workers": 2}}
    with refused("cluster", "in which the task sharpened is not registered") as caught:
        fedspan.run(values, tmp_path / "run", task=OWN)
    assert caught.value.field == "cluster"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("regressio", ". Did you mean 'regression'"),
        ("text-classification", ". Did you mean 'sequence-classification'"),
        ("trainr", r"(?!.*'trainer')"),  # the task of trainers is not suggested
    ],
)
def test_an_unknown_task_is_refused_with_the_nearest(name: str, hint: str, tiny_folder: Path) -> None:
    with pytest.raises(FedspanError, match=f"`task`: no task is named '{name}'{hint}"):
        parse_config(tiny.settings(tiny_folder) | {"task": name})


def test_options_are_validated(tiny_folder: Path) -> None:
    register_task(OWN)
    values = tiny.settings(tiny_folder) | {"task": "sharpened"}
    with refused("task_options.sharpnes"):
        parse_config(values | {"task_options": {"sharpnes": 2.0}})
    with refused("task_options.sharpness"):
        parse_config(values | {"task_options": {"sharpness": "high"}})


def test_roles_are_validated(tiny_folder: Path) -> None:
    with refused("data.roles.words"):
        tiny.config(tiny_folder, data={"roles": {"words": "text"}})


def test_an_installed_package_s_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tasks.py").write_text(PACKAGE, encoding="utf-8")
    info = tmp_path / "own_tasks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-tasks\nVersion: 1.0\n", encoding="utf-8")
    lines = ["packaged = own_tasks:PACKAGED", "lost = own_tasks:NOTHING", "wrong = own_tasks:OTHER"]
    (info / "entry_points.txt").write_text("\n".join(["[fedspan.tasks]", *lines]), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_tasks", raising=False)
    with refused("task", "'packaged' is already the name of another task"):
        register_task(replace(OWN, name="packaged"))  # also before anything has asked for the package's
    assert get_task("packaged").target_type == "number"
    register_task(get_task("packaged"))
    with refused("task", r"`task`: own_tasks:NOTHING cannot be imported"):
        get_task("lost")
    with refused("task", r"own_tasks:OTHER is not the definition of a task of this name"):
        get_task("wrong")
    with refused("task", "no task is named"):
        get_task("own_tasks:PACKAGED")  # no module by its name: a server could name one
    with refused("task", "'packaged' is already the name of another task"):
        register_task(replace(OWN, name="packaged"))


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        (replace(OWN, name="regression"), "'regression' is already the name of another task"),
        (replace(OWN, name="Own"), "lower case letters and digits"),
        (replace(OWN, head="headless"), "sharpened has an unknown head"),
        (replace(OWN, custom_metrics={}), "the metric 'confidence', which is neither in custom_metrics nor known"),
        (replace(OWN, metrics=("loss",), custom_metrics={"loss": Metric("x", True)}), "'loss' is already the name of"),
        (SequenceClassification, "a fedspan.tasks.definition.TaskDefinition"),
    ],
)
def test_what_is_no_task_or_has_a_taken_name_is_refused(definition: Any, expected: str) -> None:
    before = dict(TASKS), dict(METRICS)
    with pytest.raises(FedspanError, match=expected):
        register_task(definition)
    assert (dict(TASKS), dict(METRICS)) == before


def test_a_task_of_one_s_own_is_replaced_when_it_is_registered_again() -> None:
    """As in a notebook, whose cell makes the definition anew."""
    register_task(OWN)
    changed = replace(OWN, lr=0.5)
    register_task(changed)
    assert TASKS["sharpened"] is changed


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("collate", (TrainerExamples(1), [0], torch.device("cpu"))),
        ("compute_loss", (torch.nn.Identity(), {})),
        ("compute_client_losses", (torch.nn.Identity(), {}, torch.ones(1, 1))),
        ("predict", (torch.nn.Identity(), {})),
        ("compute_metrics", (torch.zeros(1), TrainerExamples(1), [0])),
        ("encode", (None,)),
        ("decode_predictions", (torch.zeros(1),)),
        ("decode_targets", (TrainerExamples(1), [0])),
    ],
)
def test_what_needs_examples_is_refused_with_the_way_out(name: str, arguments: tuple[Any, ...]) -> None:
    with refused("task", r"are its owners' trainers' own\. Load the adapter with PEFT"):
        getattr(TrainerTask("loss"), name)(*arguments)
