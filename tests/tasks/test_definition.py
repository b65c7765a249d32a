"""What every registered task keeps: equal engines, losses by client, other libraries' metrics, exports that reload."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

import fedspan
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.data.loading import load
from fedspan.serving.load import load_served
from fedspan.tasks import metrics, registry
from fedspan.tasks.losses import BoundsExamples
from fedspan.tasks.registry import BUILT_IN, get_task
from fedspan.tasks.settings import TaskSettings
from helpers import tiny
from helpers.exported_models import load_as_its_card_says
from helpers.families import others_slow
from helpers.refusals import refused
from helpers.task_cases import CASES, OWN, REFUSED, Scored, folders_of

NAMES = sorted(CASES)


def settings_of(request: pytest.FixtureRequest, name: str, own: Path) -> dict[str, Any]:
    values = copy.deepcopy(CASES[name].settings(folders_of(request, name, own)))
    values["federation"] = {**values["federation"], "rounds": 2}
    return values


@pytest.fixture(autouse=True)
def own_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the task of examples/own_task.py, as its own script does."""
    for name, metric in OWN.custom_metrics.items():
        monkeypatch.setitem(metrics._metrics, name, metric)
    monkeypatch.setitem(registry._tasks, OWN.name, OWN)


def test_every_task_has_a_case() -> None:
    assert {*CASES, *REFUSED} == {definition.name for definition in (*BUILT_IN, OWN)}
    assert not {*CASES} & {*REFUSED}


@pytest.mark.parametrize("name", NAMES)
def test_losses_by_client_are_the_losses_alone(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    prepared = prepare(parse_config(settings_of(request, name, tmp_path)))
    task, model, device = prepared.task, prepared.engine.adapted.model, torch.device("cpu")
    prepared.engine.prepare(prepared.train, [np.arange(len(prepared.train))])
    rng = torch.Generator().manual_seed(3)
    for value in model.parameters():  # a model that has learned something, unlike its reference
        value.data += 0.05 * torch.randn(value.shape, generator=rng)
    shared, owners = [0, 5, 1, 7, 3, 2, 4], [[0, 2], [1], [3, 5, 6]]  # the example at 4 belongs to no client
    mask_CB = torch.zeros(len(owners), len(shared))
    for client, places in enumerate(owners):
        mask_CB[client, places] = 1
    losses_C = task.compute_client_losses(model, task.collate(prepared.train, shared, device), mask_CB)
    alone = [
        task.compute_loss(model, task.collate(prepared.train, [shared[at] for at in own], device)) for own in owners
    ]
    torch.testing.assert_close(losses_C, torch.stack(alone), rtol=2e-5, atol=2e-6)
    assert len({round(float(loss), 6) for loss in losses_C}) == len(owners)


@pytest.mark.parametrize("name", others_slow(NAMES, ["causal-lm", "token-classification"]))
def test_batched_engine_equals_the_loop_and_the_export_predicts_the_same(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case, values = CASES[name], settings_of(request, name, tmp_path)
    reports = {}
    for engine in ("loop", "batched"):
        reports[engine] = fedspan.run({**values, "engine": {"name": engine}}, tmp_path / engine)
    loop, batched = (load_file(tmp_path / engine / "adapter" / "adapter_model.safetensors") for engine in reports)
    assert loop.keys() == batched.keys()
    for tensor, value in loop.items():
        torch.testing.assert_close(batched[tensor], value, rtol=1e-4, atol=case.trains_alike)
    # As PEFT loads the export, and as a merged model.
    fedspan.export(tmp_path / "loop", tmp_path / "merged", form="merged")
    expected, rows = reports["loop"].scores["test"], _held_out(values)
    for folder in (tmp_path / "loop", tmp_path / "merged"):
        served = load_served(folder)
        examples = served.task.encode(rows)
        predictions, indices = served.compute_predictions(examples), range(len(examples))
        measured = served.task.compute_metrics(predictions, examples, indices)
        shared = set(measured) & set(expected)
        assert "loss" in shared
        for metric in shared:
            assert measured[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-5), (folder.name, metric)
        if isinstance(served.task, BoundsExamples):
            losses_B, weights_B = served.task.compute_example_losses(predictions, examples, indices)
            mean = float((losses_B * weights_B).sum() / weights_B.sum())
            assert mean == pytest.approx(measured["loss"], rel=1e-5, abs=1e-6)
        # The metrics are those of other libraries.
        answers, truths = served.task.decode_predictions(predictions), served.task.decode_targets(examples, indices)
        for metric, value in case.reference(Scored(predictions, answers, truths, examples)).items():
            assert measured[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), (folder.name, metric)
    # So does the model that the card's lines load.
    named, definition = load_as_its_card_says(tmp_path / "merged"), get_task(name)
    if definition.is_embedding:
        found = torch.from_numpy(named.encode(rows["text"][:]))
        torch.testing.assert_close(found, torch.tensor(fedspan.predict(tmp_path / "merged", rows["text"][:])))
    else:
        found = replace(served, model=named).compute_predictions(examples)
        torch.testing.assert_close(found, predictions, rtol=1e-4, atol=1e-4)
    assert definition.loss_options == getattr(served.task, "loss_options", ())
    assert {"loss", definition.metric_names[0]} <= set(measured)
    assert set(measured) <= {*definition.metric_names, *definition.summary_metrics}
    assert served.task.metric in definition.metric_names


WEIGHTED = [
    ("sequence-classification", {"label_smoothing": 0.2}),
    ("sequence-classification", {"class_weights": "balanced"}),
    ("sequence-classification", {"class_weights": {"lab": 3.0, "admin": 0.5}, "label_smoothing": 0.1}),
    ("multi-label-classification", {"class_weights": "balanced", "label_smoothing": 0.1}),
    ("token-classification", {"class_weights": "balanced"}),
    ("token-classification", {"class_weights": {"O": 0.1}, "label_smoothing": 0.1}),
]


@pytest.mark.parametrize("case", others_slow(WEIGHTED, [WEIGHTED[2], WEIGHTED[3], WEIGHTED[5]]))
def test_engines_train_alike_with_weights_of_labels_and_other_than_without(
    case: tuple[str, dict[str, Any]], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    name, training = case

    def train(engine: str, **changes: Any) -> Any:
        values = settings_of(request, name, tmp_path)
        # SGD, since AdamW divides rounding by rounding where a gradient is nearly zero.
        values["training"] = {**values["training"], "optimizer": "sgd", "lr": 0.3, **changes}
        return tiny.final_tensors(prepare(parse_config({**values, "engine": {"name": engine}})))

    loop, batched, plain = train("loop", **training), train("batched", **training), train("loop")
    for tensor, value in loop.items():
        torch.testing.assert_close(batched[tensor], value, rtol=1e-4, atol=2e-5)
    assert any(not torch.allclose(value, plain[tensor], atol=1e-3) for tensor, value in loop.items())


def _held_out(values: dict[str, Any]) -> Any:
    """Return the test set of a run, with the task's own columns."""
    config = parse_config(values)
    test = load(config.data, seed=config.data_seed, task=config.task_columns).test
    return test


def test_options_have_types_and_names() -> None:
    with refused("task_options.temperature"):
        get_task("regression").parse_options({"temperature": 1.0})
    assert get_task("regression").parse_options({}) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_a_processor_is_refused(name: str) -> None:
    rows = {"text": ["a b"], "answer": ["c"], "tokens": [["a", "b"]], "label": [0], "labels": [[0, 1]], "target": [0.5]}
    definition = get_task(name)
    with refused("task", "Pass one as tokenizer="):
        definition.build(None, TaskSettings(name, ("a", "b"), 8, definition.metric_names[0]), None).encode(
            Dataset.from_dict(rows)
        )


@dataclass(frozen=True)
class _Limits:
    limit: int | str = 3


def test_a_wrong_option_is_named_without_its_types() -> None:
    definition = replace(get_task("regression"), options=_Limits)
    with refused("task_options.limit"):
        definition.parse_options({"limit": [1]})
